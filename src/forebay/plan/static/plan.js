"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (index) => style("--run" + (index % 6));
  const holder = document.getElementById("plots");
  const plots = [];

  const element = (tag, parent, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const money = (value) => value >= 1000 ? "$" + (value / 1000).toFixed(value >= 10000 ? 0 : 1) + "k" : "$" + value.toFixed(0);
  const percent = (value) => (100 * value).toFixed(Math.abs(value) < 0.1 || value > 0.9 ? 1 : 0) + " %";
  const times = (value) => value + " x";
  const whole = (value) => Number.isInteger(value) ? String(value) : "";

  // Series of different x values on one axis: each has nulls where only others have a point.
  const joined = (lines) => {
    const at = [...new Set(lines.flatMap((line) => line.points.map((point) => point.x)))].sort((a, b) => a - b);
    return [at, ...lines.map((line) => {
      const by = new Map(line.points.map((point) => [point.x, point.y]));
      return at.map((x) => by.has(x) ? by.get(x) : null);
    })];
  };

  // The bound that the objective sets, as a dashed line; the key names it.
  const rule = (bound) => ({
    hooks: {
      draw: [(u) => {
        if (bound === null) return;
        const y = u.valToPos(bound, "y", true), ctx = u.ctx;
        if (y < u.bbox.top || y > u.bbox.top + u.bbox.height) return;
        ctx.save();
        ctx.strokeStyle = style("--quiet");
        ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
        ctx.beginPath();
        ctx.moveTo(u.bbox.left, y);
        ctx.lineTo(u.bbox.left + u.bbox.width, y);
        ctx.stroke();
        ctx.restore();
      }],
    },
  });

  // Points that keep the objective are filled, the others hollow.
  const marks = (lines) => ({
    hooks: {
      draw: [(u) => {
        const ctx = u.ctx;
        ctx.save();
        lines.forEach((line, index) => line.points.forEach((point) => {
          const x = u.valToPos(point.x, "x", true), y = u.valToPos(point.y, "y", true);
          ctx.beginPath();
          ctx.arc(x, y, (point.answer ? 6 : 4) * devicePixelRatio, 0, 2 * Math.PI);
          ctx.strokeStyle = colour(index);
          ctx.fillStyle = point.meets ? colour(index) : style("--panel");
          ctx.lineWidth = 1.5 * devicePixelRatio;
          ctx.fill();
          ctx.stroke();
        }));
        ctx.restore();
      }],
    },
  });

  const draw = (title, note, lines, spec) => {
    const filled = lines.filter((line) => line.points.length);
    if (!filled.length) return;
    const box = element("div", holder, "plot");
    const head = element("header", box);
    element("h2", head, "", title);
    element("span", head, "", note);
    const key = element("div", box, "key");
    filled.forEach((line, index) => {
      const entry = element("span", key);
      element("i", entry).style.background = "var(--run" + (index % 6) + ")";
      entry.append(line.name);
    });
    if (spec.label) {
      const entry = element("span", key);
      element("i", entry, "rule");
      entry.append(spec.label);
    }
    const canvas = element("div", box);
    const readout = element("div", box, "readout", " ");
    const columns = joined(filled);
    const axis = (format) => ({
      stroke: () => style("--quiet"), grid: { stroke: () => style("--line"), width: 1 }, ticks: { show: false },
      font: "11px system-ui, sans-serif", size: 54, values: (u, ticks) => ticks.map((tick) => format(tick)),
    });
    const make = () => new uPlot({
      width: Math.max(220, canvas.clientWidth), height: 240, padding: [12, 14, 0, 0],
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: false, range: (u, low, high) => [low - 0.04 * (high - low || 1), high + 0.04 * (high - low || 1)] }, y: { range: spec.range } },
      axes: [{ ...axis(spec.x), size: 26 }, axis(spec.y)],
      series: [{}, ...filled.map((line, index) => ({ stroke: () => colour(index), width: 1.75, spanGaps: true, points: { show: false } }))],
      plugins: [rule(spec.bound ?? null), marks(filled)],
      hooks: { setCursor: [(u) => {
        const i = u.cursor.idx;
        readout.textContent = i === null || i === undefined ? " " : spec.read(columns[0][i]) + "   "
          + filled.map((line, j) => columns[j + 1][i] === null ? "" : line.name + " " + spec.y(columns[j + 1][i])).filter(Boolean).join("   ");
      }] },
    }, columns, canvas);
    const entry = { plot: make() };
    entry.rebuild = () => { entry.plot.destroy(); entry.plot = make(); };
    entry.resize = () => entry.plot.setSize({ width: Math.max(220, canvas.clientWidth), height: 240 });
    plots.push(entry);
  };

  const gpus = (count) => count + (count === 1 ? " GPU" : " GPUs");
  const from = (of) => data.counts.map((line) => ({
    name: line.name,
    points: line.points.map((point) => ({ x: point.gpus, y: of(point), meets: point.meets, answer: point.answer })),
  }));
  const traffic = (of) => data.traffic.map((line) => ({
    name: line.mode,
    points: line.points.map((point) => ({ x: point.factor, y: of(point), meets: point.meets, answer: false })),
  }));
  const upTo = (u, low, high) => [0, Math.max(high * 1.08, 1e-3)];
  const share = (bound) => (u, low) => [Math.max(0, Math.min(low, bound) - 0.05 * (1 - Math.min(low, bound))), 1.002];

  draw("Cost by number of GPUs", "a month; filled: keeps the objective", from((point) => point.per_month),
    { x: whole, y: money, range: upTo, read: gpus });
  draw("In time by number of GPUs", "share of admitted requests; filled: keeps the objective", from((point) => point.attainment),
    { x: whole, y: percent, range: share(data.attainment), bound: data.attainment, label: "objective " + percent(data.attainment), read: gpus });
  draw("In time by traffic, on the planned GPUs", "share of admitted requests; 1 x is today's", traffic((point) => point.attainment),
    { x: times, y: percent, range: share(data.attainment), bound: data.attainment, label: "objective " + percent(data.attainment), read: times });
  draw("Refused by traffic, on the planned GPUs", "share of all requests", traffic((point) => point.shed),
    { x: times, y: percent, range: (u, low, high) => [0, Math.max(high * 1.08, 2 * data.max_shed, 0.01)], bound: data.max_shed, label: "at most " + percent(data.max_shed), read: times });
  plots.forEach((entry) => entry.resize());

  let pending = 0;
  addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(() => plots.forEach((entry) => entry.resize())); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((entry) => entry.rebuild()));
})();
