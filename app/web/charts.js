// Four small time series under the page's clock, drawn by uPlot.

import uPlot from "./vendor/uPlot.esm.js";
import { css } from "./colour.js";

const WINDOW = 120;
const SHORTEST = 20;
const HEIGHT = 104;

const CHARTS = {
  tokens: { series: [["tokens/s", "--decode", true]], floor: 10 },
  slots: { series: [["% of slots", "--good", true]], fixed: 100 },
  ttft: { series: [["median", "--prefill"], ["p95", "--prefill-faint"]], floor: 0.1, unit: " s" },
  itl: { series: [["median", "--decode"], ["p99", "--decode-faint"]], floor: 10, unit: " ms" },
};

export class Charts {
  constructor() {
    this.plots = {};
    for (const [name, chart] of Object.entries(CHARTS)) {
      const target = document.getElementById(`chart-${name}`);
      this.plots[name] = new uPlot(options(chart, target.clientWidth), empty(chart), target);
      new ResizeObserver(() => this.plots[name].setSize({ width: target.clientWidth, height: HEIGHT })).observe(target);
    }
  }

  draw(store, to) {
    const end = Math.floor(to) - 1;
    // A page that has just opened does not draw two minutes of nothing.
    const first = store.seconds.keys().next().value ?? end;
    const start = Math.max(end - WINDOW, Math.min(first, end - SHORTEST));
    const series = store.series(start, end);
    for (const name of Object.keys(CHARTS)) this.plots[name].setData(series[name]);
  }

  // Colours come from the theme when a chart is drawn.
  repaint() {
    for (const plot of Object.values(this.plots)) plot.redraw();
  }
}

function options(chart, width) {
  const axis = {
    stroke: () => css("--muted"),
    grid: { stroke: () => css("--line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  return {
    width,
    height: HEIGHT,
    padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 5 } },
    scales: {
      x: { time: true },
      y: { range: (_, low, high) => [0, chart.fixed ?? Math.max(chart.floor, (high ?? 0) * 1.1)] },
    },
    axes: [
      { ...axis, size: 22, space: 70, values: (_, ticks) => ticks.map((t) => new Date(t * 1000).toLocaleTimeString("en-GB", { minute: "2-digit", second: "2-digit" })) },
      { ...axis, size: 40, space: 26, values: (_, ticks) => ticks.map((t) => `${+t.toFixed(2)}`) },
    ],
    series: [
      {},
      ...chart.series.map(([label, colour, filled], index) => ({
        label,
        stroke: () => css(colour),
        fill: filled ? () => `color-mix(in oklab, ${css(colour)} 22%, transparent)` : undefined,
        width: index ? 1.2 : 1.8,
        spanGaps: true,
        points: { show: false },
      })),
    ],
  };
}

function empty(chart) {
  return [[], ...chart.series.map(() => [])];
}
