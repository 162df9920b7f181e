"use strict";
(() => {
  const { data, holder, style, colour, plots, element, panel, key, axis: plain, rule, track, settle } = page;
  const at = data.runs[0].series.at_s;
  const shown = data.runs.map(() => true);

  const empty = (curve) => curve.every((value) => value === null);
  const number = (value) => value === null || value === undefined ? "–"
    : Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
  const milliseconds = (value) => value === null || value === undefined ? "–"
    : value >= 1000 ? (value / 1000).toFixed(2) + " s" : value.toFixed(value < 10 ? 1 : 0) + " ms";
  const percent = (value) => value === null || value === undefined ? "–" : (100 * value).toFixed(0) + " %";

  // Phases as bands with their names, and a line for the objective where the axis is a latency.
  const backdrop = (options) => ({
    hooks: {
      drawClear: [(u) => {
        const ctx = u.ctx;
        ctx.save();
        data.phases.forEach((phase, index) => {
          const left = u.valToPos(phase.from_s, "x", true), right = u.valToPos(phase.to_s, "x", true);
          if (index % 2 === 1) {
            ctx.fillStyle = style("--band");
            ctx.fillRect(left, u.bbox.top, right - left, u.bbox.height);
          }
          if (options.names && data.phases.length > 1) {
            ctx.fillStyle = style("--quiet");
            ctx.font = 11 * devicePixelRatio + "px system-ui, sans-serif";
            ctx.textAlign = "left";
            ctx.textBaseline = "bottom";
            ctx.save();
            ctx.beginPath();
            ctx.rect(left, 0, right - left, u.bbox.top);
            ctx.clip();
            ctx.fillText(phase.name, left + 2 * devicePixelRatio, u.bbox.top - 3 * devicePixelRatio);
            ctx.restore();
          }
        });
        ctx.restore();
      }],
      draw: [(u) => {
        if (!options.objective || data.objective_ms === null) return;
        const y = rule(u, data.objective_ms), ctx = u.ctx;
        if (y === null) return;
        ctx.save();
        ctx.fillStyle = style("--quiet");
        ctx.font = 11 * devicePixelRatio + "px system-ui, sans-serif";
        ctx.textAlign = "right";
        ctx.textBaseline = "bottom";
        ctx.fillText("objective " + milliseconds(data.objective_ms), u.bbox.left + u.bbox.width - 4, y - 2);
        ctx.restore();
      }],
    },
  });

  const axis = (format, log) => ({
    ...plain(format),
    ...(log ? { filter: (u, ticks) => ticks.map((tick) => /^1|^2|^5/.test(String(+tick.toPrecision(1)).replace(/^0\.0*/, "")) ? tick : null) } : {}),
  });

  const options = (width, height, spec, series) => ({
    width, height, padding: [data.phases.length > 1 ? 18 : 10, 8, 0, 0],
    cursor: { sync: { key: "forebay" }, drag: { x: true, y: false }, points: { size: 5 } },
    scales: { x: { time: false }, y: spec.log ? { distr: 3, log: 10 } : { range: (u, low, high) => [0, spec.top || Math.max(high * 1.08, 1e-3)] } },
    axes: [
      { ...axis((tick) => tick + " s"), size: 26 },
      axis(spec.format, spec.log),
    ],
    series: [{}, ...series],
    plugins: [backdrop(spec)],
    hooks: { setCursor: [(u) => spec.read(u)] },
  });

  // One plot with all runs overlaid; `solid` is drawn full, `dashed` beside it.
  const overlay = (title, note, format, solid, dashed, extra = {}) => {
    if (data.runs.every((run) => empty(run.series[solid]))) return;
    const box = panel(title, note);
    const canvas = element("div", box);
    const readout = element("div", box, "readout", " ");
    const columns = [at], lines = [];
    data.runs.forEach((run, index) => {
      for (const [name, dash] of [[solid, null], [dashed, [3, 4]]]) {
        if (!name) continue;
        const curve = run.series[name];
        columns.push(extra.log ? curve.map((value) => value === null ? null : Math.max(value, extra.floor)) : curve);
        lines.push({ stroke: () => colour(index), width: dash ? 1 : 1.75, dash, spanGaps: true, points: { show: false }, run: index });
      }
    });
    const read = (u) => {
      const index = u.cursor.idx;
      readout.textContent = index === null || index === undefined ? " " : at[index].toFixed(1) + " s   "
        + data.runs.map((run, i) => shown[i] ? run.mode + " " + format(run.series[solid][index])
          + (dashed ? " (" + format(run.series[dashed][index]) + ")" : "") : "").filter(Boolean).join("   ");
    };
    track((width, height) => {
      const spec = { format, read, names: true, ...extra };
      const plot = new uPlot(options(width, height, spec, lines.map((line) => ({ ...line, show: shown[line.run] }))), columns, canvas);
      plot.runs = lines.map((line) => line.run);
      return plot;
    }, canvas, 230);
  };

  // Served, refused and lost per second stacked, one small plot per run, on one scale.
  const stacks = () => {
    const box = panel("Answers per second", "stacked; the line is what was offered", true);
    key(box, [["--served", "served"], ["--refused", "refused"], ["--lost", "abandoned or failed"]]);
    const side = element("div", box, "side");
    side.style.setProperty("--runs", Math.min(3, data.runs.length));
    const smooth = (curve) => {
      // A bin of a fraction of a second holds a handful of answers: averaging over about a second shows the rate.
      const reach = Math.max(0, Math.round(0.5 / data.runs[0].series.bin_s));
      return curve.map((_, i) => {
        const part = curve.slice(Math.max(0, i - reach), i + reach + 1);
        return part.reduce((sum, value) => sum + value, 0) / part.length;
      });
    };
    const stacked = data.runs.map((run) => {
      const layers = [run.series.completed, run.series.refused, run.series.lost].map(smooth);
      const sums = layers.map(() => []);
      at.forEach((_, i) => layers.reduce((sum, layer, j) => (sums[j][i] = sum + layer[i]), 0));
      return { sums, offered: smooth(run.series.offered), layers };
    });
    const top = 1.08 * Math.max(...stacked.flatMap((one) => [...one.sums[2], ...one.offered]), 1e-3);
    data.runs.forEach((run, index) => {
      const cell = element("div", side);
      element("h3", cell, "", run.mode).style.color = "var(--run" + (index % 6) + ")";
      const canvas = element("div", cell);
      const readout = element("div", cell, "readout", " ");
      const { sums, offered, layers } = stacked[index];
      const fill = (name) => ({ fill: () => style(name), stroke: () => style(name), width: 0, points: { show: false } });
      const read = (u) => {
        const i = u.cursor.idx;
        readout.textContent = i === null || i === undefined ? " "
          : at[i].toFixed(1) + " s   served " + number(layers[0][i]) + "   refused " + number(layers[1][i]) + "   lost " + number(layers[2][i]);
      };
      track((width, height) => new uPlot(options(width, height, { format: number, top, read, names: true },
        [fill("--lost"), fill("--refused"), fill("--served"), { stroke: () => style("--ink"), width: 1, points: { show: false } }]),
      [at, sums[2], sums[1], sums[0], offered], canvas), canvas, 200);
    });
  };

  const legend = () => {
    const nav = document.getElementById("legend");
    data.runs.forEach((run, index) => {
      const button = element("button", nav);
      element("i", button, "swatch run" + (index % 6));
      button.append(run.mode);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        shown[index] = !shown[index];
        button.setAttribute("aria-pressed", String(shown[index]));
        for (const { plot } of plots) plot.runs?.forEach((of, line) => { if (of === index) plot.setSeries(line + 1, { show: shown[index] }); });
      });
    });
  };

  legend();
  overlay("Latency", "p50 full, p99 dashed, log scale", milliseconds, "latency_p50", "latency_p99", { log: true, floor: 0.1, objective: true });
  overlay("First token", "p50 full, p99 dashed, log scale", milliseconds, "ttft_p50", "ttft_p99", { log: true, floor: 0.1 });
  overlay("Queue wait", "p50 full, p99 dashed, as the gateway reports it", milliseconds, "queue_p50", "queue_p99");
  overlay("In flight", "requests sent and not yet answered", number, "in_flight");
  overlay("Batch size", "sequences per engine step", number, "batch_size");
  overlay("Engine busy", "share of time the engine computed", percent, "busy", null, { top: 1.05 });
  // An odd number of half-width plots leaves a hole: the last one takes the whole line.
  if (holder.children.length % 2 === 1) holder.lastElementChild.classList.add("wide");
  stacks();
  settle();
})();
