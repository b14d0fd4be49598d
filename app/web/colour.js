// One hue per request, tenant or phase; light and dark differ in lightness only.

const GOLDEN = 137.508;
const PHASES = { prefill: 70, decode: 250 };

export function dark() {
  return document.documentElement.dataset.theme === "dark";
}

export function requestHue(request, kind, by, tenants) {
  if (by === "phase") return PHASES[kind];
  const number = by === "tenant" ? tenants.indexOf(request.tenant) : request.number;
  return (200 + number * GOLDEN) % 360;
}

// `strength` 1 is the full colour, less fades towards the background.
export function paint(hue, strength = 1) {
  const lightness = dark() ? 0.34 + 0.36 * strength : 0.93 - 0.27 * strength;
  return `oklch(${lightness} ${0.04 + 0.11 * strength} ${hue})`;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
