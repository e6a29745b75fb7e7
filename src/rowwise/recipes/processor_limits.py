"""Replaces settings of a recipe for which this processor lacks instructions, and returns a note for each."""

from msgspec import structs

from rowwise.processor import BF16, Processor, family_of, missing_features
from rowwise.train.settings import Training

EMULATED = (
    "train.precision=fp8 is emulated on CPUs, which have no such products: it shows what 8 bits cost in quality, and"
    " takes longer than bf16"
)


def replace_unsupported(train: Training, processor: Processor) -> tuple[Training, tuple[str, ...]]:
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
