"""The section on a graph of users and items, or on pictures of items: what they are, and what they cost."""

from rowwise.quantity import format_bytes, format_count, format_percent
from rowwise.report.markup import Html, note, section, text_table, tiles
from rowwise.report.read import RecordedGraph, RecordedPictures, RecordedRun


def draw_towers(run: RecordedRun) -> Html:
    """The section; empty for a run without either."""
    if run.towers is not None and run.towers.graph is not None:
        return _draw_graph(run.towers.graph)
    if run.towers is not None and run.towers.pictures is not None:
        return _draw_pictures(run.towers.pictures)
    return Html("")


def _draw_graph(graph: RecordedGraph) -> Html:
    facts = [("pairs", format_count(graph.edges), "each an edge both ways")]
    facts += [(side.name, format_count(side.count), f"{side.mean:.1f} edges on average") for side in graph.nodes]
    if graph.sampled is not None:
        facts.append(("edges in evaluation", format_count(graph.sampled), f"of {format_count(2 * graph.edges)}"))
    longest = max(len(side.counts) for side in graph.nodes)
    lines = [
        (_range_of(k), *(format_count(side.counts[k]) if k < len(side.counts) else "" for side in graph.nodes))
        for k in range(longest)
    ]
    return section(
        "graph",
        "The graph",
        tiles(facts),
        text_table(("Edges of a node", *(side.name for side in graph.nodes)), lines),
        note("A node without edges has the vector of its own row, which no neighbour changes."),
    )


def _range_of(place: int) -> str:
    """The degrees that are counted at a place: 0, 1 and 2, 3 to 6, and so on."""
    first, last = 2**place - 1, 2 ** (place + 1) - 2
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _draw_pictures(pictures: RecordedPictures) -> Html:
    lines = [
        (f"{one.size} x {one.size}", format_bytes(one.bytes), format_percent(one.share), format_count(one.products))
        for one in pictures.sizes
    ]
    return section(
        "pictures",
        "Pictures of the items",
        text_table(("Size", "Bytes of a picture", "Of the file", "Multiplications"), lines),
        note(
            f"{pictures.missing:,} items have no picture, and are grey. In training each batch has one of the sizes, "
            "in evaluation the largest."
        ),
    )
