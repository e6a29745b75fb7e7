"""Logs of user behaviour on Taobao and on Kuaishou."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from rowwise.base.errors import DataError
from rowwise.ingest.columns import Columns, Dense
from rowwise.ingest.datasets.joins import gather, join, split_column
from rowwise.ingest.datasets.source import Download, SourceFolder
from rowwise.ingest.datasets.stored import (
    TEST,
    TRAIN,
    VALID,
    PartedRows,
    StoredDataset,
    cut,
    sparse_columns,
    with_parts,
)

BEHAVIOUR = {
    **dict.fromkeys(("user_id", "item_id", "category_id"), pa.int32()),
    "behavior": pa.string(),
    "timestamp": pa.int64(),
}
TAOBAO_BORDERS = (1512144000, 1512230400)  # 2 and 3 December 2017 in Beijing
FIELD, ID, VALUE = "\x01", "\x02", "\x03"  # markers of a field, its id and its value in Ali-CCP
ALI_CONTEXT = (
    *("205", "206", "207", "210", "216", "508", "509", "702", "853", "301"),
    *("109_14", "110_14", "127_14", "150_14"),
)
ALI_USER = ("101", "121", "122", "124", "125", "126", "127", "128", "129")
ALI_ROWS = 1 << 18
KUAIRAND_LOG = {
    **dict.fromkeys(("user_id", "video_id", "date", "hourmin", "time_ms"), pa.int64()),
    **dict.fromkeys(("is_click", "is_like", "long_view"), pa.int8()),
    "duration_ms": pa.float64(),
    "tab": pa.int64(),
}
KUAIRAND_USER = (
    *("user_active_degree", "is_live_streamer", "is_video_author", "follow_user_num_range", "fans_user_num_range"),
    *("friend_user_num_range", "register_days_range", *(f"onehot_feat{i}" for i in range(18))),
)
KUAIRAND_VIDEO = ("author_id", "video_type", "upload_type", "music_id", "tag")
KUAIRAND_TEST = 20220429  # first test day; earlier days of the second log are for validation
KUAIREC_LOG = {
    **dict.fromkeys(("user_id", "video_id"), pa.int64()),
    **dict.fromkeys(("video_duration", "timestamp", "watch_ratio"), pa.float64()),
}
KUAIREC_USER = (*KUAIRAND_USER[:1], *(f"onehot_feat{i}" for i in range(18)))
WATCHED = 1.0  # minimum watched time relative to the video's duration
ALIBABA_TERMS = "research use; see the page"


def _taobao(source: SourceFolder) -> PartedRows:
    rows = gather(source.csv("UserBehavior.csv", BEHAVIOUR, header=False), ("behavior",))
    first, last = TAOBAO_BORDERS[0] - 7 * 86_400, TAOBAO_BORDERS[1] + 86_400
    at_R = rows["timestamp"].to_numpy()
    rows = rows.filter(pa.array((at_R >= first) & (at_R < last)))  # drop outliers beyond the nine days
    rows = rows.sort_by("timestamp")
    rows = rows.append_column(
        "label", pc.call_function("not_equal", [rows["behavior"].cast(pa.string()), pa.scalar("pv")])
    )
    yield from cut(rows, np.searchsorted(rows["timestamp"].to_numpy(), TAOBAO_BORDERS).tolist())


def _ali_ccp(source: SourceFolder) -> PartedRows:
    """Samples in file order; the last tenth of the training samples is the validation set."""
    count = sum(len(lines) for lines in source.lines("sample_skeleton_train.csv"))
    part_R = np.where(np.arange(count) >= count * 9 // 10, VALID, TRAIN).astype(np.int8)
    yield from with_parts(_ali_samples(source, "train"), part_R)
    yield from ((table, TEST) for table in _ali_samples(source, "test"))


def _ali_samples(source: SourceFolder, part: str) -> Iterator[pa.Table]:
    """Samples with the fields of their context and of their user."""
    commons: dict[str, list[str | None]] = {}
    name = f"common_features_{part}.csv"
    for lines in source.lines(name):
        for line in lines:
            key, _, features = _ali_fields(source.find(name), line, 3)
            commons[key] = _ali_ids(features, ALI_USER)
    name = f"sample_skeleton_{part}.csv"
    for lines in source.lines(name):
        for at in range(0, len(lines), ALI_ROWS):
            rows = [_ali_fields(source.find(name), line, 6) for line in lines[at : at + ALI_ROWS]]
            unknown = next((row for row in rows if row[3] not in commons), None)
            if unknown is not None:
                raise DataError(f"{source.find(name)}: sample {unknown[0]} has common features {unknown[3]!r}, unknown")
            context = zip(*(_ali_ids(row[5], ALI_CONTEXT) for row in rows), strict=True)
            user = zip(*(commons[row[3]] for row in rows), strict=True)
            columns = dict(zip((f"f{n}" for n in (*ALI_CONTEXT, *ALI_USER)), (*context, *user), strict=True))
            labels = {
                "click": pa.array([row[1] == "1" for row in rows]),
                "buy": pa.array([row[1] == "1" and row[2] == "1" for row in rows]),
            }
            yield pa.table(labels | {name: pa.array(ids, pa.string()) for name, ids in columns.items()})


def _ali_fields(path: str, line: str, fields: int) -> list[str]:
    cells = line.split(",")
    if len(cells) != fields:
        raise DataError(f"{path}: a line has {len(cells)} cells: {line[:80]!r}", f"{fields} cells")
    return cells


def _ali_ids(features: str, names: tuple[str, ...]) -> list[str | None]:
    """The first id of each field."""
    ids: dict[str, str] = {}
    for feature in features.split(FIELD):
        name, _, rest = feature.partition(ID)
        ids.setdefault(name, rest.partition(VALUE)[0])
    return [ids.get(name) for name in names]


def _kuairand(source: SourceFolder) -> PartedRows:
    users = gather(
        source.csv("user_features_*.csv", {"user_id": pa.int64(), **dict.fromkeys(KUAIRAND_USER, pa.string())})
    )
    types = {"video_id": pa.int64(), **dict.fromkeys(KUAIRAND_VIDEO, pa.string())}
    videos = split_column(gather(source.csv("video_features_basic_*.csv", types)), "tag", ",")
    for name in ("log_standard_4_08_to_4_21_*.csv", "log_standard_4_22_to_5_08_*.csv"):
        rows = gather(source.csv(name, KUAIRAND_LOG)).sort_by("time_ms")
        rows = rows.append_column("hour", pa.array(rows["hourmin"].to_numpy() // 100))
        late_R = np.where(rows["date"].to_numpy() >= KUAIRAND_TEST, TEST, VALID).astype(np.int8)
        yield join(join(rows, users, "user_id"), videos, "video_id"), TRAIN if "4_08" in name else late_R


def _kuairec(source: SourceFolder) -> PartedRows:
    users = gather(source.csv("user_features.csv", {"user_id": pa.int64(), **dict.fromkeys(KUAIREC_USER, pa.string())}))
    items = gather(source.csv("item_categories.csv", {"video_id": pa.int64(), "feat": pa.string()}))
    lists = [text.strip("[] ").split(", ") for text in items["feat"].to_pylist()]
    items = pa.table({"video_id": items["video_id"], "categories": pa.array(lists, pa.list_(pa.string()))})
    for name in ("big_matrix.csv", "small_matrix.csv"):
        rows = gather(source.csv(name, KUAIREC_LOG)).sort_by("timestamp")
        rows = rows.append_column("label", pc.call_function("greater_equal", [rows["watch_ratio"], pa.scalar(WATCHED)]))
        rows = join(join(rows, users, "user_id"), items, "video_id")
        late = rows.num_rows * 9 // 10
        yield from ((rows.slice(0, late), TRAIN), (rows.slice(late), VALID)) if name[0] == "b" else ((rows, TEST),)


def _kuairand_dataset(what: str, suffix: str) -> StoredDataset:
    return StoredDataset(
        what=what,
        split="by time: 8 to 21 April train, 22 to 28 April validate, 29 April to 8 May test",
        download=Download(
            files=(f"KuaiRand-{suffix}.tar.gz",),
            size="up to 1 GB",
            terms="a Creative Commons licence; see the page",
            page="https://kuairand.com",
        ),
        read=_kuairand,
        columns=Columns(
            labels=("is_click", "is_like", "long_view"),
            dense=(Dense(column="duration_ms", log1p=True),),
            sparse=sparse_columns("user_id", "video_id", "tab", "hour", *KUAIRAND_USER, *KUAIRAND_VIDEO),
            time="time_ms",
        ),
    )


DATASETS = {
    "taobao": StoredDataset(
        what="100 million views, carts, favourites and purchases; the label is any of them but a view",
        split="by time: seven days train, 2 December validates, 3 December tests",
        download=Download(
            files=("UserBehavior.csv.zip",),
            size="906 MB, 3.5 GB unpacked",
            terms=ALIBABA_TERMS,
            page="https://tianchi.aliyun.com/dataset/649",
        ),
        read=_taobao,
        columns=Columns(
            labels=("label",), sparse=sparse_columns("user_id", "item_id", "category_id"), time="timestamp"
        ),
    ),
    "ali-ccp": StoredDataset(
        what="84 million impressions on Taobao, with the labels click and buy",
        split="the files of the publisher; the last tenth of the training samples validates",
        download=Download(
            files=("sample_train.tar.gz", "sample_test.tar.gz"),
            size="about 19 GB unpacked for each",
            terms=ALIBABA_TERMS,
            page="https://tianchi.aliyun.com/dataset/408",
        ),
        read=_ali_ccp,
        columns=Columns(labels=("click", "buy"), sparse=sparse_columns(*(f"f{n}" for n in (*ALI_CONTEXT, *ALI_USER)))),
    ),
    "kuairand-pure": _kuairand_dataset("1.4 million videos shown on Kuaishou, with three labels", "Pure"),
    "kuairand-1k": _kuairand_dataset("11.7 million videos shown on Kuaishou, with three labels", "1K"),
    "kuairec": StoredDataset(
        what="videos watched on Kuaishou; the label is a video watched to its end",
        split="big_matrix trains, and its last tenth by time validates; small_matrix, nearly fully observed, tests",
        download=Download(
            files=("KuaiRec.zip",),
            size="about 400 MB",
            terms="a Creative Commons licence; see the page",
            page="https://kuairec.com",
        ),
        read=_kuairec,
        columns=Columns(
            labels=("label",),
            dense=(Dense(column="video_duration", log1p=True),),
            sparse=sparse_columns("user_id", "video_id", "categories", *KUAIREC_USER),
        ),
    ),
}
