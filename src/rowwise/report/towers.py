"""Sections on a graph of users and items, on pictures of items, and on what was recommended to all users."""

from rowwise.base.quantity import format_bytes, format_count, format_percent
from rowwise.report.markup import Html, note, section, text_table, tiles
from rowwise.report.read import RecordedGraph, RecordedPictures, RecordedRun


def draw_towers(run: RecordedRun) -> Html:
    """The section; empty for a run without either."""
    if run.towers is not None and run.towers.graph is not None:
        return _draw_graph(run.towers.graph)
    if run.towers is not None and run.towers.pictures is not None:
        return _draw_pictures(run.towers.pictures)
    return Html("")


def draw_recommended(run: RecordedRun) -> Html:
    """The section; empty for a run without recommendations."""
    given = run.recommended
    if given is None:
        return Html("")
    items = f"of {format_count(given.items)} items occur"
    popular = f"of the recommended; {format_percent(given.popular_rows)} of the rows"
    facts = [
        ("users", format_count(given.users), f"up to {format_count(given.k)} items each"),
        ("coverage", format_percent(given.coverage), items),
        ("1 % most popular items", format_percent(given.popular), popular),
        ("novelty", f"{given.novelty:.2f} bits", "mean of -log2 of an item's share of the rows"),
    ]
    if given.short:
        facts.append(("users with fewer items", format_count(given.short), "they have seen the others"))
    return section("recommended", "Recommendations", tiles(facts))


def _draw_graph(graph: RecordedGraph) -> Html:
    facts = [("pairs", format_count(graph.edges), "each an edge both ways")]
    facts += [(side.name, format_count(side.count), f"{side.mean:.1f} edges on average") for side in graph.nodes]
    if graph.sampled is not None:
        facts.append(("edges in evaluation", format_count(graph.sampled), f"of {format_count(2 * graph.edges)}"))
    longest = max(len(side.counts) for side in graph.nodes)
    lines = [
        (_degree_range(k), *(format_count(side.counts[k]) if k < len(side.counts) else "" for side in graph.nodes))
        for k in range(longest)
    ]
    return section(
        "graph",
        "The graph",
        tiles(facts),
        text_table(("Edges of a node", *(side.name for side in graph.nodes)), lines),
        note("A node without edges has the vector of its own row, which no neighbour changes."),
    )


def _degree_range(index: int) -> str:
    """The degrees of an element of `counts`: 0, 1 to 2, 3 to 6, and so on."""
    first, last = 2**index - 1, 2 ** (index + 1) - 2
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _draw_pictures(pictures: RecordedPictures) -> Html:
    chosen, largest = pictures.chosen, pictures.sizes[-1]
    lines = [
        (f"{p.size} x {p.size}", format_bytes(p.bytes), format_percent(p.share), format_count(p.products))
        for p in pictures.sizes
    ]
    titles: tuple[str, ...] = ("Size", "Bytes of a picture", "Of the file", "Multiplications")
    facts: list[tuple[str, str, str]] = []
    rule = "the largest"
    if chosen is not None:
        titles = (*titles, "Chosen for")
        lines = [(*line, format_percent(share)) for line, share in zip(lines, chosen.shares, strict=True)]
        bytes_share, products_share = chosen.bytes / largest.bytes, chosen.products / largest.products
        facts = [
            ("bytes of a picture", format_bytes(chosen.bytes), f"{bytes_share:.0%} of the largest size"),
            ("multiplications", format_count(chosen.products), f"{products_share:.0%}, scale model included"),
        ]
        rule = "the size that the scale model chooses"
    return section(
        "pictures",
        "Pictures of the items",
        tiles(facts) if facts else Html(""),
        text_table(titles, lines),
        note(
            f"{pictures.missing:,} items have no picture, and are grey. In training each batch has one of the sizes, "
            f"in evaluation {rule}."
        ),
    )
