"""Transforms: pure functions on Arrow columns, one definition for training and serving.

`load` reads what they name, `sources` says which columns they take, `schema_after` checks types without data, and
`apply` makes columns. Importing this needs no torch.
"""

from rowwise.ingest.transform.chain import (
    AnyKind,
    BoundTransforms,
    LoadedTransforms,
    Transforms,
    apply,
    decode,
    digest,
    from_json,
    load,
    schema_after,
    serving,
    sources,
    to_json,
    unread,
)
from rowwise.ingest.transform.classes import Onehot
from rowwise.ingest.transform.ids import Enumerate, FirstX, NGram, PositiveModulus, SigridHash
from rowwise.ingest.transform.mapping import MapId
from rowwise.ingest.transform.numbers import BoxCox, Bucketize, Clamp, Fill, Log1p, Logit
from rowwise.ingest.transform.pairs import Cartesian, ComputeScore, IdListTransform
from rowwise.ingest.transform.read import SplitText, ToNumber, ToTime, ToWhole
from rowwise.ingest.transform.select import Sampling
from rowwise.ingest.transform.times import GetLocalHour, GetLocalWeekday
from rowwise.ingest.transform.transform import RowPosition, Transform
from rowwise.ingest.transform.user_function import UserFunction

__all__ = [
    "AnyKind",
    "BoundTransforms",
    "BoxCox",
    "Bucketize",
    "Cartesian",
    "Clamp",
    "ComputeScore",
    "Enumerate",
    "Fill",
    "FirstX",
    "GetLocalHour",
    "GetLocalWeekday",
    "IdListTransform",
    "LoadedTransforms",
    "Log1p",
    "Logit",
    "MapId",
    "NGram",
    "Onehot",
    "PositiveModulus",
    "RowPosition",
    "Sampling",
    "SigridHash",
    "SplitText",
    "ToNumber",
    "ToTime",
    "ToWhole",
    "Transform",
    "Transforms",
    "UserFunction",
    "apply",
    "decode",
    "digest",
    "from_json",
    "load",
    "schema_after",
    "serving",
    "sources",
    "to_json",
    "unread",
]
