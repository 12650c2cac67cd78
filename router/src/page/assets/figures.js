// Numbers and moments as people read them.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (number) => grouped.format(number);

/** `950`, `12.3k`, `4.1M`: at most five characters. */
export function short(number) {
  if (number < 10) return number === Math.round(number) ? String(number) : number.toFixed(1);
  if (number < 9999.5) return grouped.format(number);
  const [value, unit] = number < 999_500 ? [number / 1e3, "k"] : number < 999_500_000 ? [number / 1e6, "M"] : [number / 1e9, "G"];
  return (value < 99.95 ? value.toFixed(1) : value.toFixed(0)) + unit;
}

/** Seconds in the unit in which people think of them. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.00095) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.00995) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 0.9995) return `${(value * 1e3).toFixed(0)} ms`;
  if (value < 99.95) return `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
  return duration(value);
}

/** `2 h 5 min`. */
export function duration(value) {
  const minutes = Math.floor(value / 60);
  if (minutes < 2) return `${Math.max(0, Math.round(value))} s`;
  if (minutes < 120) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d`;
}

export const percent = (share) => `${Math.round(share * 100)} %`;

export function gibibytes(bytes) {
  const value = bytes / 2 ** 30;
  return value < 9.95 ? value.toFixed(1) : value.toFixed(0);
}

export function clock(millis) {
  return new Date(millis).toLocaleTimeString("en-GB");
}

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** The first few names, and how many more there are. */
export function some(names, most = 6) {
  return names.length > most ? `${names.slice(0, most).join(", ")} and ${names.length - most} more` : names.join(", ");
}
