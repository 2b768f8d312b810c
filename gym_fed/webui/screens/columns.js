// The text of --columns: pairs of names, or JSON where a name holds a comma or begins or ends with a space.
export function columnsText(columns) {
  const names = Object.values(columns);
  return names.some((name) => name.includes(",") || name !== name.trim()) ? JSON.stringify(columns) : Object.entries(columns).map((pair) => pair.join("=")).join(",");
}

export function namedColumns(text) {
  if (text.trim().startsWith("{")) { try { return JSON.parse(text); } catch { return {}; } }
  return Object.fromEntries(text.split(",").filter(Boolean).map((pair) => [pair.slice(0, pair.indexOf("=")).trim(), pair.slice(pair.indexOf("=") + 1).trim()]));
}
