"""Ranks talking to each other: the only home of torch.distributed. Everything above knows `Comm` alone."""
