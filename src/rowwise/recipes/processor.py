"""Settings of a recipe that depend on the processor: threads, unless the recipe sets them, and the precision.

Idle threads sleep, because spinning ones would take the processor from other processes, and waking them costs tens of
microseconds in each operator. A small step therefore ends sooner on one thread: DeepFM with ten tables of dim 16, an
MLP of 128-64 and batches of 1,024 takes 3.0 ms on one and 4.8 ms on two; batches of 4,096 take 9.5 ms on both (Intel
Xeon with AVX-512).

Models with interactions also work between matrix products. That is not counted, so their small steps may take several
times as long as estimated. DHEN, Wukong, AutoInt, xDeepFM and MaskNet with batches of 64 take 4.4 to 8.3 ms on one
thread and 5.0 to 20.5 ms on two of a busy machine.

The choice follows from the recipe and the instruction set, never from a measurement: the number of threads changes
the bits of matrix products.
"""

from collections.abc import Sequence

from msgspec import structs

from rowwise.base.processor import BF16, Processor, family_of, missing_features
from rowwise.recipes.model_configs import Model
from rowwise.recipes.operations import multiplications
from rowwise.tables.spec import Table
from rowwise.train.settings import Training

SMALL_STEP_s = 4e-3  # longest small step, on one thread
FLOP_s = {"avx512f": 1 / 1.5e11, "avx2": 1 / 4e10}  # seconds per multiplication or addition, by instruction set
OTHER_FLOP_s = 1 / 1e10
ID_s = 40e-9  # seconds for the lookup and the update of a row
EMULATED = (
    "train.precision=fp8 is emulated on CPUs, which lack fp8 products: it measures the loss in quality, and is slower"
    " than bf16"
)


def choose_threads(
    model: Model, tables: Sequence[Table], dense_features: int, batch: int, processor: Processor, available: int
) -> int:
    """One thread for a step that is estimated to be small, else all that are available."""
    weights = multiplications(model, tables, dense_features)
    if weights is None:
        return available
    ids = sum(len(table.feature_names) for table in tables)
    flop_s = next((s for flag, s in FLOP_s.items() if flag in processor.flags), OTHER_FLOP_s)
    # Forward, gradient of the inputs and gradient of the weights: a multiplication and an addition each.
    step_s = batch * (6 * weights * flop_s + ids * ID_s)
    return 1 if step_s < SMALL_STEP_s else available


def replace_unsupported(train: Training, processor: Processor) -> tuple[Training, tuple[str, ...]]:
    """Replace settings that need missing instructions; returns a note for each."""
    if train.precision == "fp8" and train.device.startswith("cpu"):
        return train, (EMULATED,)
    if train.precision != "bf16" or not train.device.startswith("cpu") or BF16 not in missing_features(processor):
        return train, ()
    family = family_of(processor)
    measured = f" (measured on {family.name}: {family.measured})" if family is not None and family.measured else ""
    note = (
        f"train.precision=bf16 is replaced by fp32, because this processor has no bf16 instructions and software takes"
        f" several times as long{measured}; train.precision=bf16_always keeps it"
    )
    return structs.replace(train, precision="fp32"), (note,)
