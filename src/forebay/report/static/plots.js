"use strict";
// What every page of plots has: its data, its colours, panels, and plots that follow the window and the theme.
const page = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const holder = document.getElementById("plots");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (index) => style("--run" + (index % 6));
  const plots = [];

  const element = (tag, parent, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };

  const panel = (title, note, wide) => {
    const box = element("div", holder, "plot" + (wide ? " wide" : ""));
    const head = element("header", box);
    element("h2", head, "", title);
    element("span", head, "", note);
    return box;
  };

  // `entries`: [colour of its swatch, text]; null in place of a colour is the line of an objective.
  const key = (box, entries) => {
    const line = element("div", box, "key");
    for (const [swatch, text] of entries) {
      const entry = element("span", line);
      const mark = element("i", entry, swatch === null ? "rule" : "");
      if (swatch !== null) mark.style.background = "var(" + swatch + ")";
      entry.append(text);
    }
  };

  const axis = (format) => ({
    stroke: () => style("--quiet"), grid: { stroke: () => style("--line"), width: 1 }, ticks: { show: false },
    font: "11px system-ui, sans-serif", size: 54,
    values: (u, ticks) => ticks.map((tick) => tick === null ? "" : format(tick)),
  });

  // A dashed line across the plot, for what the objective sets.
  const rule = (u, value) => {
    const y = u.valToPos(value, "y", true), ctx = u.ctx;
    if (y < u.bbox.top || y > u.bbox.top + u.bbox.height) return null;
    ctx.save();
    ctx.strokeStyle = style("--quiet");
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(u.bbox.left, y);
    ctx.lineTo(u.bbox.left + u.bbox.width, y);
    ctx.stroke();
    ctx.restore();
    return y;
  };

  // `make(width, height)` draws a plot into `box`; it is drawn anew when the theme changes.
  const track = (make, box, height) => {
    const width = () => Math.max(220, box.clientWidth);
    const entry = { plot: null, rebuild: () => { entry.plot?.destroy(); entry.plot = make(width(), height); } };
    entry.resize = () => entry.plot.setSize({ width: width(), height });
    entry.rebuild();
    plots.push(entry);
  };

  // When all are there: the scroll bar that they brought has made the page narrower.
  const settle = () => {
    const resize = () => plots.forEach((entry) => entry.resize());
    let pending = 0;
    resize();
    addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(resize); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((entry) => entry.rebuild()));
  };

  return { data, holder, style, colour, plots, element, panel, key, axis, rule, track, settle };
})();
