"use strict";
(() => {
  const { data, style, colour, element, panel, key, axis, rule, track, settle } = page;
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

  const draw = (title, note, drawn, spec) => {
    const filled = drawn.filter((line) => line.points.length);
    if (!filled.length) return;
    const box = panel(title, note);
    const lines = filled.map((line, index) => ["--run" + (index % 6), line.name]);
    key(box, spec.label ? [...lines, [null, spec.label]] : lines);
    const canvas = element("div", box);
    const readout = element("div", box, "readout", " ");
    const columns = joined(filled);
    const bound = { hooks: { draw: [(u) => { if (spec.bound !== undefined) rule(u, spec.bound); }] } };
    track((width, height) => new uPlot({
      width, height, padding: [12, 14, 0, 0],
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: false, range: (u, low, high) => [low - 0.04 * (high - low || 1), high + 0.04 * (high - low || 1)] }, y: { range: spec.range } },
      axes: [{ ...axis(spec.x), size: 26 }, axis(spec.y)],
      series: [{}, ...filled.map((line, index) => ({ stroke: () => colour(index), width: 1.75, spanGaps: true, points: { show: false } }))],
      plugins: [bound, marks(filled)],
      hooks: { setCursor: [(u) => {
        const i = u.cursor.idx;
        readout.textContent = i === null || i === undefined ? " " : spec.read(columns[0][i]) + "   "
          + filled.map((line, j) => columns[j + 1][i] === null ? "" : line.name + " " + spec.y(columns[j + 1][i])).filter(Boolean).join("   ");
      }] },
    }, columns, canvas), canvas, 240);
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
  settle();
})();
