"""What this processor does otherwise than a recipe says, and the line that says so."""

from msgspec import structs

from rowwise.processor import BF16, Processor, family_of, lacks
from rowwise.train.settings import Training


def adapt_to_processor(train: Training, processor: Processor) -> tuple[Training, tuple[str, ...]]:
    """The settings as this processor can follow them, and a line for each that it cannot."""
    if train.precision != "bf16" or not train.device.startswith("cpu") or BF16 not in lacks(processor):
        return train, ()
    family = family_of(processor)
    measured = f" (measured on {family.name}: {family.measured})" if family is not None and family.measured else ""
    line = (
        f"train.precision=bf16 is replaced by fp32, because this processor has no bf16 products and software takes"
        f" several times as long{measured}; train.precision=bf16_always keeps it"
    )
    return structs.replace(train, precision="fp32"), (line,)
