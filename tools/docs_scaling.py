"""Draws docs/scaling.svg and prints the tables of docs/scaling.md: models of papers on 8 to 4,096 devices.

python tools/docs_scaling.py
"""

import math
from dataclasses import replace
from pathlib import Path

from rowwise.base.quantity import format_bytes
from rowwise.planning.planner.machines import machine_named
from rowwise.planning.simulate.published_models import read_published
from rowwise.planning.simulate.simulation import SimulatedMachine, simulate
from rowwise.report.charts import Chart, ChartLine, draw_chart

ROOT = Path(__file__).parents[1]
HOSTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SAMPLES = 512  # of a device
COLOURS = {"blue": "DLRM-A", "vermillion": "DLRM-I", "green": "DLRM-F"}
STYLE = (
    "text{font:12px sans-serif;fill:#444}.grid,.tick{stroke:#ddd}.axis{stroke:#888}path,polyline{fill:none;"
    "stroke-width:2}.blue{stroke:#0072b2}.vermillion{stroke:#d55e00}.green{stroke:#009e73}"
)


def main() -> None:
    lines = []
    for colour, name in COLOURS.items():
        published = read_published(name.lower())
        assert published is not None
        print(f"\n| {name}: devices | samples/s | of linear scaling | what limits | memory |\n|---|---|---|---|---|")
        points, first = [], None
        for hosts in HOSTS:
            place = SimulatedMachine(machine=machine_named(f"{hosts}x8xzionex"), even=True)
            found = simulate(replace(published.simulated(""), batch=SAMPLES * 8 * hosts, published=()), place)
            if found.step_s is None:
                print(f"| {hosts * 8:,} | | | does not fit: a rank lacks {format_bytes(found.lacking_bytes)} | |")
                continue
            first = first or found.samples_s / hosts
            linear = found.samples_s / hosts / first
            points.append((math.log2(hosts * 8), found.samples_s / hosts / 8e3))
            memory = " + ".join(f"{format_bytes(m.tables_bytes + m.dense_bytes)} {m.tier}" for m in found.memory)
            limit = f"{found.help[0].what} ({found.help[0].saved:.0%})"
            print(f"| {hosts * 8:,} | {found.samples_s / 1e6:.2f} M | {linear:.0%} | {limit} | {memory} |")
        lines.append(ChartLine(name=name, points=points, colour=colour, dots=True))
    chart = Chart(
        key="scaling",
        label="thousands of samples a second of a device",
        lines=lines,
        x_title="devices, as a power of two",
        from_zero=True,
    )
    drawn = str(draw_chart(chart))
    begin, end = drawn.index("<svg"), drawn.index("</svg>") + len("</svg>")
    svg = drawn[begin:end].replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    head = svg.index(">") + 1
    (ROOT / "docs" / "scaling.svg").write_text(f"{svg[:head]}<style>{STYLE}</style>{svg[head:]}\n")


if __name__ == "__main__":
    main()
