"""Reference operators in plain torch: the definition that each kernel matches bit for bit.

(Only the interaction and layers match within float rounding, see [Note: Contracted sums] in `_cpp/sums.h`.)

Arguments are those of the operators registered in `_cpp`; `features`, `tables` and `hyper` are the small CPU
tensors of `layout`. Everything else may be on any device. Slow on purpose: clear steps over whole tensors, in the
order of [Note: Merge order] and [Note: Column sums] (see `_cpp/tables.h`, `_cpp/simd.h`).

Axes: N ids, B samples, F features, W buckets, D columns of a table, S columns of the output, M merged rows.
"""

from rowwise.tables.ops.reference.apply import UpdateMemory as UpdateMemory
from rowwise.tables.ops.reference.apply import update as update
from rowwise.tables.ops.reference.exchange import pack_ids as pack_ids
from rowwise.tables.ops.reference.exchange import place as place
from rowwise.tables.ops.reference.graph import choose_edges as choose_edges
from rowwise.tables.ops.reference.graph import sum_sampled as sum_sampled
from rowwise.tables.ops.reference.idmap import map_ids as map_ids
from rowwise.tables.ops.reference.interact import dots as dots
from rowwise.tables.ops.reference.interact import interact as interact
from rowwise.tables.ops.reference.interact import interact_grad as interact_grad
from rowwise.tables.ops.reference.interact import layers as layers
from rowwise.tables.ops.reference.interact import pair_sums as pair_sums
from rowwise.tables.ops.reference.interact import pair_sums_grad as pair_sums_grad
from rowwise.tables.ops.reference.interact import relu_grad as relu_grad
from rowwise.tables.ops.reference.jagged import bucketize as bucketize
from rowwise.tables.ops.reference.jagged import deduplicate as deduplicate
from rowwise.tables.ops.reference.jagged import expand as expand
from rowwise.tables.ops.reference.jagged import find_newer as find_newer
from rowwise.tables.ops.reference.jagged import in_range as in_range
from rowwise.tables.ops.reference.jagged import lengths as lengths
from rowwise.tables.ops.reference.jagged import spread as spread
from rowwise.tables.ops.reference.jagged import take as take
from rowwise.tables.ops.reference.lookup import FeatureBags as FeatureBags
from rowwise.tables.ops.reference.lookup import gather as gather
from rowwise.tables.ops.reference.lookup import mark as mark
from rowwise.tables.ops.reference.lookup import offsets as offsets
from rowwise.tables.ops.reference.lookup import pool as pool
from rowwise.tables.ops.reference.lookup import pool_weight_grad as pool_weight_grad
from rowwise.tables.ops.reference.quantise import keep_largest as keep_largest
from rowwise.tables.ops.reference.quantise import pack4 as pack4
from rowwise.tables.ops.reference.quantise import unpack4 as unpack4
from rowwise.tables.ops.reference.random import fill_uniform as fill_uniform
from rowwise.tables.ops.reference.random import fill_uniform_rows as fill_uniform_rows
from rowwise.tables.ops.reference.rowtype import pack as pack
from rowwise.tables.ops.reference.rowtype import unpack as unpack
from rowwise.tables.ops.reference.sums import column_sum as column_sum
from rowwise.tables.ops.reference.sums import merge as merge
