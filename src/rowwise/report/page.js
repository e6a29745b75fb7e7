"use strict";
// Shows the values under the pointer. A line's points are read back from its path by the scales of its chart, so values
// are not stored twice; they have four digits. Without this script the page lacks nothing else.
(() => {
  const charts = [...document.querySelectorAll("svg[data-kind]")].map(read);

  function read(svg) {
    const scale = (name) => {
      const [low, high, begin, end] = svg.dataset[name].split(" ").map(Number);
      return { low, high, begin, end, value: (at) => low + ((at - begin) / (end - begin)) * (high - low) };
    };
    const stack = svg.dataset.kind === "stack";
    const series = [...svg.querySelectorAll("[data-name]")].map((path) => {
      let points = (path.dataset.at || path.getAttribute("d")).match(/[-\d.]+,[-\d.]+/g).map((p) => p.split(",").map(Number));
      if (stack) points = points.slice(1, -1);
      return { name: path.dataset.name, colour: path.classList[1], points };
    });
    const { unit, xtitle: title } = svg.dataset;
    const outside = svg.querySelector(".outside")?.textContent ?? "";
    return { svg, x: scale("x"), y: scale("y"), stack, series, unit, title, outside };
  }

  function format(value, unit) {
    if (unit === "%") return value.toFixed(1) + "\u202f%";
    const size = Math.abs(value);
    if (size < 10000 && unit !== "B") {
      return size >= 1000 ? value.toFixed(0) : size >= 0.001 || size === 0 ? value.toPrecision(4) : value.toPrecision(3);
    }
    const power = Math.max(0, Math.min(6, Math.floor(Math.log10(size || 1) / 3)));
    return (value / 1000 ** power).toPrecision(3) + "\u202f" + ["", "k", "M", "G", "T", "P", "E"][power] + unit;
  }

  const nearest = (points, at) => points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));

  // Values outside of the y range are drawn at its edge.
  function atEdge(chart, y) {
    if (y <= chart.y.end && chart.outside.includes("\u2191")) return "\u2265 ";
    return y >= chart.y.begin && chart.outside.includes("\u2193") ? "\u2264 " : "";
  }

  function values(chart, at) {
    const readings = chart.series.map((line) => ({ ...line, point: nearest(line.points, at) }));
    return readings.map((reading, k) => {
      const [, y] = reading.point;
      const below = chart.stack && k + 1 < readings.length ? readings[k + 1].point[1] : chart.y.begin;
      const value = chart.y.value(chart.stack ? y - below + chart.y.begin : y);
      return { ...reading, text: (chart.stack ? "" : atEdge(chart, y)) + format(value, chart.unit) };
    });
  }

  function draw(parent, name, attributes) {
    const element = parent.appendChild(document.createElementNS(parent.namespaceURI, name));
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }

  function cross(chart, at) {
    chart.over?.remove();
    chart.over = draw(chart.svg, "g", {});
    draw(chart.over, "line", { class: "cross", x1: at, x2: at, y1: chart.y.begin, y2: chart.y.end });
  }

  function tip(chart, x, readings) {
    const box = document.createElement("div");
    box.className = "tip";
    const line = (colour, name, value) => {
      const row = box.appendChild(document.createElement("div"));
      if (colour) row.appendChild(document.createElement("span")).className = "swatch " + colour;
      row.append(name);
      row.appendChild(document.createElement("b")).textContent = value;
    };
    line("", chart.title, format(chart.x.value(x), ""));
    for (const reading of readings) line(reading.colour, reading.name, reading.text);
    const figure = chart.svg.parentNode;
    figure.appendChild(box);
    const frame = chart.svg.getBoundingClientRect();
    const offset = frame.left - figure.getBoundingClientRect().left;
    const width = frame.width;
    const left = (x / chart.svg.viewBox.baseVal.width) * width;
    const wanted = left < width / 2 ? left + 16 : left - box.offsetWidth - 16;
    box.style.left = Math.max(2, Math.min(wanted, width - box.offsetWidth)) + offset + "px";
    box.style.top = figure.querySelector("figcaption").offsetHeight + 16 + "px";
    chart.tip = box;
  }

  function clear() {
    for (const chart of charts) {
      chart.over?.remove();
      chart.tip?.remove();
    }
  }

  function show(chart, event) {
    clear();
    const frame = chart.svg.getBoundingClientRect();
    const at = ((event.clientX - frame.left) / frame.width) * chart.svg.viewBox.baseVal.width;
    if (at < chart.x.begin - 8 || at > chart.x.end + 8 || !chart.series.length) return;
    const longest = chart.series.reduce((a, b) => (b.points.length > a.points.length ? b : a));
    const x = nearest(longest.points, at)[0];
    // A cross at the same x in all charts with the same axis.
    for (const peer of charts) {
      const peerX = peer.x.begin + ((chart.x.value(x) - peer.x.low) / (peer.x.high - peer.x.low)) * (peer.x.end - peer.x.begin);
      if (peer.title === chart.title && peerX >= peer.x.begin - 1 && peerX <= peer.x.end + 1) cross(peer, peerX);
    }
    const readings = values(chart, x);
    if (!chart.stack) {
      for (const { colour, point } of readings) draw(chart.over, "circle", { class: "here " + colour, cx: point[0], cy: point[1], r: 3.5 });
    }
    tip(chart, x, readings);
  }

  for (const chart of charts) {
    chart.svg.addEventListener("pointermove", (event) => show(chart, event));
    chart.svg.addEventListener("pointerdown", (event) => show(chart, event));
    chart.svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && clear());
  }
  document.documentElement.dataset.charts = String(charts.length);
})();
