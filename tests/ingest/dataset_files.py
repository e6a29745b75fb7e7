"""Tiny files in the formats of the publishers, with made-up values: what `rowwise data get` converts."""

import gzip
import json
import zipfile

import numpy as np

from rowwise.ingest.datasets.display_ads import AVAZU_IDS, FRAPPE
from rowwise.ingest.datasets.platforms import ALI_CONTEXT, ALI_USER, KUAIRAND_USER, KUAIREC_USER

ROWS = 60


def draw(name):
    return np.random.default_rng(sum(map(ord, name)))


def write_csv(path, header, rows, delimiter=","):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [delimiter.join(header)] if header else []
    path.write_text("\n".join([*lines, *(delimiter.join(map(str, row)) for row in rows)]) + "\n")


def criteo_rows(count=ROWS):
    rng = draw("criteo")
    for index in range(count):
        numbers = ["" if rng.random() < 0.2 else int(rng.integers(-1, 500)) for _ in range(13)]
        words = ["" if rng.random() < 0.2 else f"{rng.integers(0, 4) * 987_654:08x}" for _ in range(26)]
        yield [int(index % 3 == 0), *numbers, *words]


def criteo_x4(folder):
    write_csv(folder / "dac" / "train.txt", (), criteo_rows(), "\t")


def criteo_x1(folder):
    header = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    bars(folder, header, lambda rng: [round(rng.random(), 3) for _ in range(13)] + rng.integers(0, 9, 26).tolist())


def bars(folder, header, cells):
    for part in ("train", "valid", "test"):
        rng = draw(part)
        write_csv(folder / f"{part}.csv", header, ([i % 2, *cells(rng)] for i in range(ROWS)))


def avazu(folder):
    rng = draw("avazu")
    header = ["id", "click", "hour", *AVAZU_IDS]
    lines = [",".join(header)]
    for i in range(ROWS):
        hour = f"1410{21 + i * 10 // ROWS}{i % 24:02}"
        lines.append(",".join([str(i), str(int(i % 4 == 0)), hour, *(f"{v:08x}" for v in rng.integers(0, 5, 21))]))
    folder.mkdir(parents=True)
    (folder / "train.gz").write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))


def movielens_1m(folder):
    rng = draw("1m")
    ratings = [f"{1 + i % 7}::{1 + i % 5}::{1 + int(rng.integers(5))}::{978300000 + i * 37 % 59}" for i in range(ROWS)]
    users = [f"{u}::{'MF'[u % 2]}::{(1, 18, 25)[u % 3]}::{u}::4806{u}" for u in range(1, 8)]
    films = [f"{m}::Misérables, Les ({1990 + m})::Drama|Comedy" for m in range(1, 6)]
    with_ends = {"ratings": ratings, "users": users, "movies": films}
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "ml-1m.zip", "w") as archive:
        for name, lines in with_ends.items():
            archive.writestr(f"ml-1m/{name}.dat", ("\n".join(lines) + "\n").encode("latin-1"))


def movielens(folder):
    rng = draw("20m")
    ratings = (
        [1 + i % 7, 10 * (1 + i % 5), int(rng.integers(1, 11)) / 2, 1_147_880_044 + i * 37 % 59] for i in range(ROWS)
    )
    write_csv(folder / "ml-20m" / "ratings.csv", ["userId", "movieId", "rating", "timestamp"], ratings)
    films = ([10 * m, f'"Fast, The ({m})"', "Action|Crime"] for m in range(1, 5))  # one film is not listed
    write_csv(folder / "ml-20m" / "movies.csv", ["movieId", "title", "genres"], films)


def amazon(folder):
    rows = ([f"AGKAS{i % 7}", f"B00{i % 5}", float(1 + i % 5), 1_452_647_382_000 + i * 37 % 59] for i in range(ROWS))
    write_csv(folder / "Toys_and_Games.csv", ["user_id", "parent_asin", "rating", "timestamp"], rows)
    items = [{"parent_asin": f"B00{i}", "main_category": "Toys", "store": None, "price": "9.99"} for i in range(5)]
    (folder / "meta_Toys_and_Games.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))


def yelp(folder):
    folder.mkdir(parents=True)
    reviews = [
        {
            "review_id": f"r{i}",
            "user_id": f"u{i % 7}",
            "business_id": f"b{i % 5}",
            "stars": 1.0 + i % 5,
            "text": "\u00e9\n",
        }
        | {"date": f"2018-07-{1 + i * 7 % 28:02} 22:09:11"}
        for i in range(ROWS)
    ]
    businesses = [
        {"business_id": f"b{i}", "city": "Tucson", "state": "AZ", "latitude": 32.2, "longitude": -110.9}
        | {"categories": "Doctors, Health" if i else None, "attributes": {"a": 1}}
        for i in range(5)
    ]
    for name, rows in (("review", reviews), ("business", businesses)):
        file = folder / f"yelp_academic_dataset_{name}.json"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def gowalla(folder):
    rows = [f"{i % 7}\t2010-10-{1 + i * 7 % 28:02}T23:55:27Z\t30.23\t-97.79\t{22847 + i % 5}" for i in range(ROWS)]
    folder.mkdir(parents=True)
    file = folder / "loc-gowalla_totalCheckins.txt.gz"
    file.write_bytes(gzip.compress(("\n".join(rows) + "\n").encode()))


def lightgcn(folder):
    folder.mkdir(parents=True)
    (folder / "train.txt").write_text("".join(f"{u} {u} {u + 1} {u + 2}\n" for u in range(10)) + "10\n")
    (folder / "test.txt").write_text("".join(f"{u} {u + 3}\n" for u in range(10)))


def taobao(folder):
    kinds = ("pv", "buy", "pv", "cart", "fav")
    rows = [[i % 7, i % 5, 3, kinds[i % 5], 1_511_544_000 + i * 13_000] for i in range(ROWS)]
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "UserBehavior.csv.zip", "w") as archive:
        lines = [",".join(map(str, row)) for row in [*rows[::-1], [1, 1, 1, "pv", -2_134_949_234]]]
        archive.writestr("UserBehavior.csv", "\n".join(lines) + "\n")


def ali_ccp(folder):
    def features(names, row):
        return "\x01".join(f"{name}\x02{row % 4}{name[:3]}\x031.0" for name in names)

    for part in ("train", "test"):
        where = folder / f"sample_{part}"
        commons = ([f"c{i}", len(ALI_USER), features(ALI_USER, i)] for i in range(5))
        write_csv(where / f"common_features_{part}.csv", (), commons)
        rows = ([i, int(i % 3 == 0), int(i % 6 == 0), f"c{i % 5}", 1, features(ALI_CONTEXT, i)] for i in range(ROWS))
        write_csv(where / f"sample_skeleton_{part}.csv", (), rows)


def kuairand(folder, suffix="pure"):
    data = folder / "data"
    header = ["user_id", "video_id", "date", "hourmin", "time_ms", "is_click", "is_like", "is_follow", "long_view"]
    for name, days in (("4_08_to_4_21", [20220410]), ("4_22_to_5_08", [20220427, 20220428, 20220429, 20220430])):
        rows = []
        for i in range(ROWS):
            labels = (i % 2, int(i % 9 == 0), 0, i % 3 % 2)
            rows.append((i % 7, i % 5, days[i % len(days)], 1200 + i % 60, 1649520000000 + i, *labels, 5000, 7))
        write_csv(data / f"log_standard_{name}_{suffix}.csv", [*header, "duration_ms", "tab"], rows)
    users = ([u, *(f"{u % 3}" for _ in KUAIRAND_USER)] for u in range(7))
    write_csv(data / f"user_features_{suffix}.csv", ["user_id", *KUAIRAND_USER], users)
    videos = ([v, v % 2, "NORMAL", "2022-04-01", "Web", v, '"12,65"' if v else ""] for v in range(5))
    names = ["video_id", "author_id", "video_type", "upload_dt", "upload_type", "music_id", "tag"]
    write_csv(data / f"video_features_basic_{suffix}.csv", names, videos)


def kuairec(folder):
    data = folder / "KuaiRec 2.0" / "data"
    header = ["user_id", "video_id", "play_duration", "video_duration", "time", "date", "timestamp", "watch_ratio"]
    for name in ("big", "small"):
        rows = [
            [i % 7, i % 5, 9, 8, "2020-07-05 00:08:23", 20200705, 1593878903.4 + i * 37 % 59, i % 3]
            for i in range(ROWS)
        ]
        write_csv(data / f"{name}_matrix.csv", header, rows)
    users = ([u, *(f"{u % 3}" for _ in KUAIREC_USER)] for u in range(7))
    write_csv(data / "user_features.csv", ["user_id", *KUAIREC_USER], users)
    write_csv(data / "item_categories.csv", ["video_id", "feat"], ([v, f'"[{v}, 9]"'] for v in range(5)))


WRITERS = {
    "ali-ccp": ali_ccp,
    "amazon-2023": amazon,
    "amazon-books-m1": lightgcn,
    "avazu": avazu,
    "avazu-x1": lambda folder: bars(
        folder, ["label", *(f"feat_{i}" for i in range(1, 23))], lambda rng: rng.integers(0, 9, 22).tolist()
    ),
    "avazu-x4": avazu,
    "criteo-x1": criteo_x1,
    "criteo-x4": criteo_x4,
    "frappe-x1": lambda folder: bars(folder, ["label", *FRAPPE], lambda rng: rng.integers(0, 9, 10).tolist()),
    "gowalla": gowalla,
    "gowalla-m1": lightgcn,
    "kuairand-1k": lambda folder: kuairand(folder, "1k"),
    "kuairand-pure": kuairand,
    "kuairec": kuairec,
    "movielens-1m": movielens_1m,
    "movielens-20m": movielens,
    "movielens-32m": movielens,
    "movielens-tags-x1": lambda folder: bars(
        folder, ["label", "user_id", "item_id", "tag_id"], lambda rng: rng.integers(0, 9, 3).tolist()
    ),
    "taobao": taobao,
    "yelp": yelp,
    "yelp-m1": lightgcn,
}
