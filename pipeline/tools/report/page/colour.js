// Numbers as colours: one end of the palette below zero, the other above.

// How far towards the end of the palette, in steps of a twentieth; the browser mixes by theme.
export function diverging(value, most, { strongest = 100, middle = "var(--middle)" } = {}) {
  const share = most ? Math.min(Math.abs(value) / most, 1) : 0;
  const percent = Math.round(share * 20) * (strongest / 20);
  return `color-mix(in srgb, var(--${value < 0 ? "low" : "high"}) ${percent}%, ${middle})`;
}
