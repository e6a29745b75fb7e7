"""Made-up logs of the kinds that people have, and the role that their owners would give to each column.

Roles: "number", "id" (a table), "time", "out" (names the row, tells nothing or too much), "group". Several that are
as good stand together, as in "number id".
"""

import datetime
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

Draw = np.random.Generator
EITHER = "number id"
WORDS = "the a very good bad thing that was with love it and then broke soft blue cheap size fits returned"


class Log(NamedTuple):
    """Columns with their roles; the label has none."""

    label: str
    columns: dict[str, tuple[object, str]]

    @property
    def table(self) -> pa.Table:
        return pa.table({name: values for name, (values, _) in self.columns.items()})

    @property
    def roles(self) -> dict[str, str]:
        return {name: role for name, (_, role) in self.columns.items() if name != self.label}


def _label(draw: Draw, logit: np.ndarray) -> np.ndarray:
    return (draw.random(len(logit)) < 1 / (1 + np.exp(-logit))).astype(int)


def _pick(draw: Draw, words: str, rows: int) -> list[str]:
    return draw.choice(words.split(), rows).tolist()


def _moments(draw: Draw, rows: int, days: int = 60) -> list[datetime.datetime]:
    start = datetime.datetime(2024, 1, 1)
    return [start + datetime.timedelta(seconds=int(s)) for s in np.sort(draw.integers(0, days * 86_400, rows))]


def _floats(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    """As pandas stores whole numbers of which some are missing."""
    return pa.array(values.astype(float), mask=missing)


def _sentences(draw: Draw, rows: int) -> list[str]:
    words = WORDS.split()
    return [" ".join(draw.choice(words, draw.integers(8, 30))) for _ in range(rows)]


def shop(draw: Draw, rows: int) -> Log:
    customer, product = draw.integers(0, rows // 8, rows), draw.integers(0, 200, rows)
    price = np.round(np.exp(draw.normal(3, 1, rows)), 2)
    quantity = draw.geometric(0.5, rows)
    sold = _label(draw, draw.normal(size=rows // 8)[customer] + draw.normal(size=200)[product] - 0.5)
    when = _moments(draw, rows)
    return Log("returned", {
        "InvoiceNo": (536_000 + np.arange(rows) // 3, "id group out"),
        "StockCode": ([f"{85000 + p}{'AB'[p % 2]}" for p in product], "id"),
        "Description": ([f"ITEM {p} OF METAL" for p in product], "id"),
        "Quantity": (quantity, "number"),
        "InvoiceDate": ([t.strftime("%m/%d/%Y %H:%M") for t in when], "time"),
        "UnitPrice": (price, "number"),
        "CustomerID": (_floats(customer + 12_346, draw.random(rows) < 0.2), "id"),
        "Country": (_pick(draw, "France Germany Spain Japan", rows), "id"),
        "returned": (sold, ""),
    })  # fmt: skip


def ads(draw: Draw, rows: int) -> Log:
    ad, site = draw.integers(0, 300, rows), draw.integers(0, 60, rows)
    clicked = _label(draw, draw.normal(size=300)[ad] - 1)
    return Log("click", {
        "id": (draw.permutation(rows) + 10_000_000_000, "out"),
        "click": (clicked, ""),
        "hour": (14_102_100 + np.sort(draw.integers(0, 24, rows)), "id out"),
        "C1": (draw.choice([1001, 1002, 1005, 1010], rows), EITHER),
        "banner_pos": (draw.choice(8, rows), EITHER),
        "site_id": ([f"{s * 2654435761 % 2**32:08x}" for s in site], "id"),
        "app.id": ([f"{s * 40503 % 2**32:08x}" for s in draw.integers(0, 90, rows)], "id"),
        "device_ip": ([f"10.{i % 7}.{i % 31}.{i % 11}" for i in draw.integers(0, rows // 4, rows)], "id"),
        "Device Model": (_pick(draw, "a1 b2 c3 d4 e5", rows), "id"),
        "ad-id": (ad.astype(np.uint64) * np.uint64(61_169_110_123_457_001) + np.uint64(2**63), "id"),
        "user_agent": ([f"Mozilla/5.0 (X11; Linux {i}) Gecko Safari/{i}" for i in draw.integers(0, 25, rows)], "id"),
        "bid_price": (np.round(draw.gamma(2, 0.4, rows), 4), "number"),
    })  # fmt: skip


def churn(draw: Draw, rows: int) -> Log:
    tenure = draw.integers(0, 73, rows)
    monthly = np.round(draw.uniform(18, 119, rows), 2)
    left = _label(draw, 1 - tenure / 20 + (monthly - 65) / 40)
    total = [f"{t * m:.2f}" if t else " " for t, m in zip(tenure, monthly, strict=True)]
    return Log("Churn", {
        "customerID": ([f"{draw.integers(1000, 9999)}-{i:05}" for i in range(rows)], "out"),
        "gender": (_pick(draw, "Male Female", rows), "id"),
        "SeniorCitizen": (draw.integers(0, 2, rows), EITHER),
        "Partner": (_pick(draw, "Yes No", rows), "id"),
        "tenure": (tenure, "number"),
        "PhoneService": (_pick(draw, "Yes No", rows), "id"),
        "InternetService": (draw.choice(["DSL", "Fiber optic", "No"], rows).tolist(), "id"),
        "Contract": (draw.choice(["Month-to-month", "One year", "Two year"], rows).tolist(), "id"),
        "MonthlyCharges": (monthly, "number"),
        "TotalCharges": (total, "number"),
        "NumberOfCalls": (draw.poisson(3, rows), "number"),
        "ZIP Code": ([f"0{z}" for z in draw.integers(1000, 1090, rows)], "id"),
        "Churn": (left, ""),
    })  # fmt: skip


def hotel(draw: Draw, rows: int) -> Log:
    country = _pick(draw, "PRT GBR FRA ESP DEU", rows)
    lead = draw.geometric(0.01, rows)
    canceled = _label(draw, lead / 80 - 1.5)
    return Log("is_canceled", {
        "is_canceled": (canceled, ""),
        "lead_time": (lead, "number"),
        "arrival_date_year": (draw.choice([2015, 2016, 2017], rows), EITHER),
        "arrival_date_month": (_pick(draw, "January March July August", rows), "id"),
        "arrival_date_week_number": (draw.integers(1, 54, rows), EITHER),
        "stays_in_week_nights": (draw.poisson(2, rows), "number id"),
        "adults": (draw.choice([1, 2, 3], rows, p=[0.2, 0.7, 0.1]), EITHER),
        "children": (_floats(draw.poisson(0.3, rows), draw.random(rows) < 0.01), "number"),
        "country": (country, "id"),
        "agent": (_floats(draw.integers(1, 90, rows), draw.random(rows) < 0.15), "id"),
        "adr": (np.round(draw.gamma(4, 25, rows), 2), "number"),
        "required_car_parking_spaces": (draw.binomial(1, 0.1, rows), EITHER),
        "reservation_status": (["Canceled" if c else "Check-Out" for c in canceled], "out"),
        "reservation_status_date": ([t.strftime("%Y-%m-%d") for t in _moments(draw, rows)], "time"),
    })  # fmt: skip


def survey(draw: Draw, rows: int) -> Log:
    age, children = draw.integers(18, 66, rows), draw.poisson(1.1, rows)
    affair = _label(draw, -1 + 0.03 * (age - 40) + 0.2 * children)
    return Log("affair", {
        "rownames": (np.arange(1, rows + 1), "out"),
        "affair": (affair, ""),
        "sex": (_pick(draw, "male female", rows), "id"),
        "age": (age.astype(float), "number"),
        "yearsmarried": (draw.choice([0.125, 0.75, 1.5, 4, 7, 10, 15], rows), "number"),
        "children": (["yes" if c else "no" for c in children], "id"),
        "n_children": (children, "number"),
        "religiousness": (draw.integers(1, 6, rows), EITHER),
        "education": (draw.choice([9, 12, 14, 16, 17, 18, 20], rows), EITHER),
        "expenses": (np.round(draw.gamma(3, 40, rows)).astype(int), "number"),
        "comment": (_sentences(draw, rows), "out"),
        "submitted": ([t.strftime("%b %d %Y") for t in _moments(draw, rows)], "time"),
    })  # fmt: skip


def spam(draw: Draw, rows: int) -> Log:
    marks = draw.geometric(0.3, rows) - 1
    is_spam = _label(draw, 0.6 * marks - 1.5)
    frequencies = {
        f"word_freq_{w}": (np.round(draw.exponential(0.3, rows), 2), "number") for w in ("free", "you", "hp")
    }
    return Log("spam", {
        "spam": (is_spam, ""),
        "exclaim_mess": (marks, EITHER),
        "capital_run_length_longest": (draw.geometric(0.03, rows), "number"),
        "num_char": (draw.gamma(1, 9, rows), "number"),
        "line_breaks": (draw.geometric(0.004, rows), "number"),
        "to_multiple": (draw.integers(0, 2, rows), EITHER),
        "image": (draw.poisson(0.1, rows), EITHER),
        "winner": (_pick(draw, "yes no", rows), "id"),
        "from": ([f"user{u}@mail{u % 9}.com" for u in draw.integers(0, rows // 5, rows)], "id"),
        "time": ([t.strftime("%Y-%m-%dT%H:%M:%S+01:00") for t in _moments(draw, rows)], "time"),
        **frequencies,
    })  # fmt: skip


def sensors(draw: Draw, rows: int) -> Log:
    at = 1_700_000_000.0 + np.sort(draw.integers(0, 40 * 86_400, rows))
    torque, wear = draw.normal(40, 10, rows), draw.integers(0, 250, rows)
    readings = {f"s{n}": (draw.normal(n, 1, rows), "number") for n in range(1, 6)}
    readings["s1"][0][draw.random(rows) < 0.01] = np.inf
    readings["s2"][0][draw.random(rows) < 0.05] = np.nan
    return Log("failure", {
        "UDI": (np.arange(1, rows + 1), "out"),
        "timestamp": (at, "time"),
        "Machine": ([f"M{m}" for m in draw.integers(14_000, 14_060, rows)], "id"),
        "Type": (_pick(draw, "L M H", rows), "id"),
        "Air temperature [K]": (np.round(draw.normal(300, 2, rows), 1), "number"),
        "Rotational speed [rpm]": (draw.normal(1540, 180, rows).round().astype(int), "number"),
        "Torque [Nm]": (np.round(torque, 1), "number"),
        "Tool wear [min]": (wear, "number"),
        "humidity_pct": ([f"{h:.1f}%" for h in draw.uniform(20, 80, rows)], "number"),
        "lat": (draw.uniform(47, 48, rows), "number"),
        "longitude": (draw.uniform(9, 17, rows), "number"),
        "firmware": (["1.4.2"] * rows, "out"),
        "failure": (_label(draw, (torque - 50) / 5 + (wear - 200) / 40), ""),
        **readings,
    })  # fmt: skip


def banking(draw: Draw, rows: int) -> Log:
    duration, balance = draw.geometric(0.004, rows), np.round(draw.normal(1400, 3000, rows)).astype(int)
    return Log("y", {
        "account_number": (draw.integers(10**9, 10**10, rows), "out"),
        "age": (draw.integers(18, 90, rows), "number"),
        "job": (_pick(draw, "admin. services technician retired student", rows), "id"),
        "marital": (_pick(draw, "married single divorced", rows), "id"),
        "default": (_pick(draw, "yes no", rows), "id"),
        "balance": (balance, "number"),
        "housing": (_pick(draw, "True False", rows), "id"),
        "day": (draw.integers(1, 32, rows), EITHER),
        "month": (_pick(draw, "may jun jul", rows), "id"),
        "duration": (duration, "number"),
        "campaign": (draw.geometric(0.4, rows), EITHER),
        "pdays": (np.where(draw.random(rows) < 0.8, -1, draw.integers(1, 400, rows)), "number"),
        "previous": (draw.poisson(0.5, rows), EITHER),
        "branchCode": (draw.integers(100, 180, rows), "id"),
        "dob": ([f"{d:02}/{m:02}/{y}" for d, m, y in draw.integers((1, 1, 1940), (29, 13, 2005), (rows, 3))], "time"),
        "income": ([f"${i:,.2f}" for i in draw.gamma(4, 9000, rows)], "number"),
        "y": (_label(draw, duration / 250 - 2), ""),
    })  # fmt: skip


def medical(draw: Draw, rows: int) -> Log:
    """Several rows of each patient, who is ill or not; no times."""
    patients = rows // 4
    patient = np.repeat(np.arange(patients), 4)[:rows]
    ill = _label(draw, draw.normal(-0.5, 1, patients))[patient]
    order = draw.permutation(len(patient))
    patient, ill = patient[order], ill[order]
    return Log("diagnosis", {
        "patient_id": ([f"P{p:05}" for p in patient], "group"),
        "visit": (draw.integers(1, 5, len(patient)), EITHER),
        "Glucose": (draw.normal(120, 30, len(patient)).round().astype(int), "number"),
        "BloodPressure": (draw.normal(70, 12, len(patient)).round().astype(int), "number"),
        "BMI": (np.round(draw.normal(32, 6, len(patient)), 1), "number"),
        "Pregnancies": (draw.poisson(3, len(patient)), EITHER),
        "Age": (draw.integers(21, 80, len(patient)), "number"),
        "icd_code": (draw.choice(["E11.9", "I10", "J45.0", "K21"], len(patient)).tolist(), "id"),
        "jitter": (draw.exponential(0.006, len(patient)), "number"),
        "smoker": (_pick(draw, "Y N", len(patient)), "id"),
        "diagnosis": (ill, ""),
    })  # fmt: skip


def jobs(draw: Draw, rows: int) -> Log:
    user, job = draw.integers(0, rows // 10, rows), draw.integers(0, 400, rows)
    when = _moments(draw, rows)
    return Log("applied", {
        "uid": (user * 7 + 13, "id"),
        "jobId": (job + 5000, "id"),
        "employer_key": (job % 37, "id"),
        "created_at": ([t.isoformat(" ") for t in when], "time"),
        "updated_at": ([(t + datetime.timedelta(days=3)).isoformat(" ") for t in when], "time"),
        "salary_min": (draw.integers(20, 90, rows) * 1000, "number"),
        "is_remote": (draw.random(rows) < 0.3, EITHER),
        "skills": ([",".join(draw.choice(["sql", "java", "excel", "go", "care"], 3)) for _ in range(rows)], "id"),
        "years_experience": (draw.integers(0, 20, rows), "number"),
        "description": (_sentences(draw, rows), "out"),
        "search_rank": (draw.integers(1, 60, rows), EITHER),
        "applied": (_label(draw, draw.normal(size=400)[job] - 1), ""),
    })  # fmt: skip


def music(draw: Draw, rows: int) -> Log:
    song = draw.integers(0, 500, rows)
    return Log("target", {
        "msno": ([f"{u * 2654435761 % 2**40:010x}=" for u in draw.integers(0, rows // 9, rows)], "id"),
        "song": (song + 90_000, "id"),
        "genre_ids": ([f"{g}|{g + 7}" for g in draw.integers(400, 420, rows)], "id"),
        "song_length": (draw.normal(240_000, 40_000, rows).round().astype(int), "number"),
        "language": (_floats(draw.choice([3, 10, 17, 31, 52], rows), draw.random(rows) < 0.01), "id"),
        "bd": (draw.integers(0, 60, rows), EITHER),
        "city": (draw.integers(1, 23, rows), "id"),
        "registered_via": (draw.choice([3, 4, 7, 9, 13], rows), EITHER),
        "registration_init_time": (20_100_000 + draw.integers(1, 13, rows) * 100 + draw.integers(1, 29, rows), "time"),
        "isrc": ([f"US{s:08}" for s in song], "id"),
        "plays_last_30_days": (draw.geometric(0.2, rows), "number"),
        "target": (_label(draw, draw.normal(size=500)[song]), ""),
    })  # fmt: skip


def flights(draw: Draw, rows: int) -> Log:
    carrier = _pick(draw, "UA AA B6 DL EV", rows)
    delay = draw.exponential(20, rows).round() - 8
    return Log("late", {
        "year": (draw.choice([2013, 2014], rows), EITHER),
        "month": (draw.integers(1, 13, rows), EITHER),
        "dep_time": (_floats(draw.integers(0, 24, rows) * 100 + 30, draw.random(rows) < 0.03), EITHER),
        "dep_delay": (_floats(delay, draw.random(rows) < 0.03), "number"),
        "carrier": (carrier, "id"),
        "flight": (draw.integers(1, 900, rows), "id"),
        "tailnum": ([f"N{n}JB" for n in draw.integers(100, 300, rows)], "id"),
        "origin": (_pick(draw, "EWR LGA JFK", rows), "id"),
        "air_time": (draw.normal(150, 60, rows).round(), "number"),
        "distance": (draw.integers(80, 3000, rows), "number"),
        "hour": (draw.integers(5, 24, rows), EITHER),
        "time_hour": (_moments(draw, rows), "time"),
        "late": (_label(draw, delay / 15 - 1), ""),
    })  # fmt: skip


def wide(draw: Draw, rows: int) -> Log:
    """Numbers alone, without names."""
    numbers = {f"V{n}": (draw.normal(size=rows) * (n + 1), "number") for n in range(60)}
    return Log("Class", {
        "Time": (np.sort(draw.integers(0, 172_792, rows)).astype(float), "number time"),
        **numbers,
        "Amount": (np.round(draw.gamma(0.5, 180, rows), 2), "number"),
        "Class": (_label(draw, numbers["V1"][0] / 2 - 2), ""),
    })  # fmt: skip


def homes(draw: Draw, rows: int) -> Log:
    when = _moments(draw, rows, 400)
    return Log("sold", {
        "pid": (draw.permutation(rows) * 37 + 526_301_100, "out"),
        "Gr Liv Area": (draw.normal(1500, 500, rows).round().astype(int), "number"),
        "Bedroom AbvGr": (draw.choice([1, 2, 3, 4, 5], rows), EITHER),
        "Year.Built": (draw.integers(1900, 2011, rows), EITHER),
        "Neighborhood": (_pick(draw, "NAmes Gilbert StoneBr OldTown", rows), "id"),
        "Central Air": (_pick(draw, "Y N", rows), "id"),
        "agent.phone": ([f"+43 1 {n}" for n in draw.integers(10_000, 10_040, rows)], "id"),
        "list_price": ([f"{p:,}" for p in draw.integers(60_000, 800_000, rows)], "number"),
        "listed": ([t.strftime("%d.%m.%Y") for t in when], "time"),
        "photo_url": ([f"https://homes.example/{i}.jpg" for i in range(rows)], "out"),
        "latitude": (draw.uniform(41, 43, rows), "number"),
        "discount %": (draw.integers(0, 40, rows), "number"),
        "sold": (_label(draw, draw.normal(size=rows)), ""),
    })  # fmt: skip


LOGS: dict[str, tuple[Callable[[Draw, int], Log], int]] = {
    "shop": (shop, 4000), "ads": (ads, 4000), "churn": (churn, 1500), "hotel": (hotel, 3000), "survey": (survey, 600),
    "spam": (spam, 1200), "sensors": (sensors, 2500), "banking": (banking, 2000), "medical": (medical, 800),
    "jobs": (jobs, 4000), "music": (music, 4000), "flights": (flights, 4000), "wide": (wide, 2000),
    "homes": (homes, 300),
}  # fmt: skip
