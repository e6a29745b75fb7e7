"""The meaning of a column by its name, in any of the usual spellings: user_id, userId, "User ID", user-id, user.id."""

import re
from typing import Literal

Sense = Literal["id", "amount", "time", "part of time", "row", ""]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Last words of names of ids.
IDS = _words("""
    id uid cid pid sid gid aid vid mid tid oid qid guid uuid key code hash fingerprint asin sku isbn issn ean
    upc gtin msno imei imsi msisdn iban bic ssn vin mac ip zip zipcode zip3 zip5 postcode postal plz fips icd
    ndc naics cik ticker barcode serial phone mobile email cookie token username login nickname slug url uri
    referer referrer
""")
# Things that an id may name, as the last word: user, but not user_age. A plural is a count.
THINGS = _words("""
    user item product ad advertisement campaign creative advertiser publisher device site domain app page query
    session category subcategory genre brand store shop seller merchant vendor supplier video movie film song
    track artist author channel city country region district county state customer client member patient subject
    household person player team hotel destination carrier airline airport station sensor machine meter employee
    company account department branch kind type class status gender sex race colour color mode
    method medium segment cluster school teacher student doctor hospital ward provider agent operator payer
    plan offer coupon order invoice transaction card contract ticket basket visit visitor trip flight route line vehicle
    driver room sport language locale browser os version model
""")
SHORT = "cust|acct|prod|usr|emp|cat|trans|txn|tx|dept|loc|geo|inv|ord|subj|pat|adv|camp"  # abbreviations of things
NUMBERS = _words("""
    no nr num number
""")  # order_no, but no_of_orders
COUNTS = _words("""
    num n count cnt total avg average mean median max min sum std pct percent ratio rate log
""")
AMOUNTS = _words("""
    age amount amt avg average balance bal bill bmi budget bytes capacity capital charge charges children
    cholesterol click clicks cnt comments complaints consumption cost count credit debt delay delta density
    depth deposit dependents discount displacement dist distance dose duration earnings elevation expenditure
    expense expenses experience fare fee fees followers freq frequency friends gain glucose hdl heart height
    horsepower hp humidity impressions income insulin kb kg kids km kwh lat latitude ldl length likes limit lng
    load loads loan lon long longitude loss margin mb mean median mileage miles mpg noise number odometer paid
    pain pct percent percentage people pop population power pressure price prob probability profit pulse qty
    quantity rainfall rate rating ratio recency reps revenue rooms rpm salary sales score sd share shares
    siblings size speed spend spending spent sqft std sum surcharge tax temp temperature tenure tip tolls total
    usage value views visits voltage volume votes wage wages wait weight width wind year
""")
UNITS = _words("""
    seconds secs minutes mins hours hrs days weeks months years
""")
TIMES = _words("""
    time timestamp ts date datetime at on when created updated modified dob birthday birthdate dt
""")
PARTS = _words("""
    hour weekday dow dayofweek day month quarter week season
""")
ROWS = _words("""
    unnamed index idx row rownum rownumber rownames rn rowid
""")
JOINED = re.compile(rf"(?:{SHORT}|{'|'.join(sorted(THINGS))})_?(?:id|no|nr|num|code|key|uid)")
GROUPS = _words("""
    session patient subject household impression encounter admission family qid basket
""")
# The time of a row is rather the time of its event than of a later change, and never a date of long ago.
HAPPENED = _words("""
    event click clicked created order ordered purchase purchased visit view request impression time timestamp ts
    datetime transaction incident accident
""")
LATER = _words("updated modified end ended closed delivered last deleted start changed resolved")
LONG_AGO = _words("""
    birth dob birthday birthdate born expiry expires due hire hired release released registered registration signup
    joined founded established opened
""")


def words_of(name: str) -> tuple[str, ...]:
    """The words of a name, in lower case."""
    parted = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    parted = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1 \2", parted)
    return tuple(word.lower() for word in re.split(r"[\W_]+", parted) if word)


def sense_of(name: str) -> Sense:
    """The meaning of a column of this name; empty if unknown."""
    words = words_of(name)
    if not words or (words[0] in ROWS and len(words) <= 2):
        return "row"
    first, last = words[0], _plain(words[-1])
    before = words[-2] if len(words) > 1 else ""
    thing = before in THINGS or before in SHORT.split("|")
    numbered = last in NUMBERS and (thing or bool(before and last != "num" and before not in AMOUNTS))
    if first in COUNTS and len(words) > 1 and last != "id":
        return "amount"
    if (first in NUMBERS and words[1:2] == ("of",)) or first in UNITS or {"since", "per"} & set(words):
        return "amount"
    coded = _singular(last).endswith(("code", "zip"))
    if coded or numbered or _singular(last) in IDS or any(JOINED.fullmatch(_singular(word)) for word in words):
        return "id"
    if last in THINGS:
        return "id"
    if last in TIMES:
        return "time"
    if last in PARTS:
        return "part of time"
    if (
        last in UNITS
        or AMOUNTS & {_plain(word) for word in words}
        or (last != _singular(last) and _singular(last) in THINGS)
    ):
        return "amount"
    return "id" if "id" in words else ""


def is_group(name: str) -> bool:
    """Whether rows with one value of such a column belong together, as those of a query or a patient do."""
    words = set(words_of(name))
    return bool(GROUPS & words) or ("id" in words and bool(words & {"query", "search", "srch"}))


def is_birth(name: str) -> bool:
    """Whether a time is a property of a person or a thing, not the time of the row."""
    return bool(LONG_AGO & set(words_of(name)))


def time_rank(name: str) -> int:
    """Rank of a column as the time of the row; lower is more likely."""
    words = set(words_of(name))
    return 2 if words & LATER else 0 if words & HAPPENED else 1


def _plain(word: str) -> str:
    return word.rstrip("0123456789") or word


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and len(word) > 2 and not word.endswith("ss") else word
