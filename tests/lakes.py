"""Tables of lakes for tests, written by delta-rs and pyiceberg, and a Delta log and Iceberg deletes made by hand."""

import base64
import json
import struct
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet as pq

Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
VECTOR_MAGIC = 1681511377


def deletion_vector(rows):
    """The rows as an inline deletion vector of a Delta log."""
    from pyroaring import BitMap

    content = struct.pack("<IQI", VECTOR_MAGIC, 1, 0) + BitMap(rows).serialize()
    content += bytes(-len(content) % 4)
    text = base64.b85encode(content).decode().translate(str.maketrans(B85, Z85))
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(content), "cardinality": len(rows)}


class DeltaLake:
    """A Delta table in a folder."""

    kind = "delta"

    def __init__(self, folder):
        self.name = f"delta:{folder}/clicks"
        self.folder = str(folder / "clicks")

    def append(self, rows, partitions=(), mode="append", **how):
        from deltalake import write_deltalake

        write_deltalake(self.folder, rows, mode=mode, partition_by=list(partitions) or None, **how)

    def overwrite(self, rows):
        self.append(rows, mode="overwrite")

    def versions(self):
        from deltalake import DeltaTable

        return list(range(DeltaTable(self.folder).version() + 1))

    def forget(self, version):
        from deltalake import DeltaTable

        DeltaTable(self.folder).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    def add_column(self, rows):
        self.append(rows, schema_mode="merge")

    def read(self):
        """The rows as delta-rs reads them."""
        from deltalake import DeltaTable

        return DeltaTable(self.folder).to_pyarrow_table()


class IcebergLake:
    """An Iceberg table of a catalog in SQLite."""

    kind = "iceberg"

    def __init__(self, folder, catalog=None):
        from pyiceberg.catalog.sql import SqlCatalog

        self.environment = {
            "PYICEBERG_CATALOG__LAKE__URI": f"sqlite:///{folder}/catalog.db",
            "PYICEBERG_CATALOG__LAKE__WAREHOUSE": f"file://{folder}",
        }
        uri, warehouse = f"sqlite:///{folder}/catalog.db", f"file://{folder}"
        self.catalog = catalog or SqlCatalog("lake", uri=uri, warehouse=warehouse)
        self.catalog.create_namespace("shop")
        self.name, self.table = f"iceberg:{folder}/shop/clicks", None

    def append(self, rows, partitions=()):
        if self.table is None:
            self.table = self.catalog.create_table("shop.clicks", schema=rows.schema)
            with self.table.update_spec() as spec:
                for name in partitions:
                    spec.add_identity(name)
        self.table.append(rows)

    def overwrite(self, rows):
        self.table.overwrite(rows)

    def versions(self):
        return [snapshot.snapshot_id for snapshot in self.table.snapshots()]

    def forget(self, version):
        self.table.maintenance.expire_snapshots().by_id(version).commit()

    def add_column(self, rows):
        with self.table.update_schema() as schema:
            schema.union_by_name(rows.schema)
        self.table.append(rows)

    def read(self):
        """The rows as pyiceberg reads them."""
        return self.table.scan().to_arrow()


LAKES = {lake.kind: lake for lake in (DeltaLake, IcebergLake)}


def write_log(folder, features=(), mapping="none", vector=None):
    """A Delta table of one file and 30 rows, with these features of readers."""
    (folder / "_delta_log").mkdir(parents=True)
    pq.write_table(pa.table({"user": range(30)}), folder / "a.parquet")
    column = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "user"}
    fields = [{"name": "user", "type": "long", "nullable": True, "metadata": column}]
    size = (folder / "a.parquet").stat().st_size
    add = {"path": "a.parquet", "partitionValues": {}, "size": size, "modificationTime": 1, "dataChange": True}
    add |= {"stats": json.dumps({"numRecords": 30})} | ({} if vector is None else {"deletionVector": vector})
    versions = {"minReaderVersion": 3, "minWriterVersion": 7}
    actions = [
        {"protocol": versions | {"readerFeatures": list(features), "writerFeatures": list(features)}},
        {
            "metaData": {
                "id": "a",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": fields}),
                "partitionColumns": [],
                "configuration": {"delta.columnMapping.mode": mapping},
            }
        },
        {"add": add},
    ]
    (folder / "_delta_log" / f"{0:020}.json").write_text("".join(json.dumps(line) + "\n" for line in actions))
    return f"delta:{folder}"


def delete_a_row(table):
    """The table of a catalog gets a snapshot with a file of deleted positions, as other writers of Iceberg leave it."""
    from pyiceberg import manifest

    class DeletesWriter(manifest.ManifestWriterV2):
        def content(self):
            return manifest.ManifestContent.DELETES

        @property
        def _meta(self):
            return super()._meta | {"content": "deletes"}

    place, old, number, sequence = table.location(), table.current_snapshot(), 77, 9
    data = next(iter(table.scan().plan_files())).file
    deletes, listed = f"{place}/data/deletes.parquet", f"{place}/metadata/snap-{number}.avro"
    pq.write_table(pa.table({"file_path": [data.file_path], "pos": [0]}), deletes.removeprefix("file://"))
    file = manifest.DataFile.from_args(
        content=manifest.DataFileContent.POSITION_DELETES,
        file_path=deletes,
        file_format=manifest.FileFormat.PARQUET,
        partition=data.partition,
        record_count=1,
        file_size_in_bytes=100,
    )
    output = table.io.new_output(f"{place}/metadata/deletes.avro")
    with DeletesWriter(table.specs()[data.spec_id], table.schema(), output, number, "null") as writer:
        added = manifest.ManifestEntryStatus.ADDED
        entry = manifest.ManifestEntry.from_args(status=added, snapshot_id=number, data_file=file)
        writer.add_entry(entry)
    output = table.io.new_output(listed)
    with manifest.write_manifest_list(2, output, number, old.snapshot_id, sequence, "null") as lists:
        lists.add_manifests([*old.manifests(table.io), writer.to_manifest_file()])
    newest = Path(table.metadata_location.removeprefix("file://"))
    metadata = json.loads(newest.read_text())
    snapshot = metadata["snapshots"][-1] | {
        "snapshot-id": number,
        "parent-snapshot-id": old.snapshot_id,
        "sequence-number": sequence,
        "manifest-list": listed,
    }
    metadata["snapshots"].append(snapshot)
    metadata["refs"]["main"]["snapshot-id"] = metadata["current-snapshot-id"] = number
    metadata["last-sequence-number"] = sequence
    (newest.parent / "00099-deletes.metadata.json").write_text(json.dumps(metadata))
