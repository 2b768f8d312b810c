// How searches and the settings of trials are written.
import {state} from "/static/app.js";

export const shapeOf = (one) => (one.is_running ? state("half", "running") : one.ended >= one.wanted ? state("filled", "finished") : state("hollow", "stopped"));
export const valueOf = (value) => (typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : typeof value === "string" ? value : JSON.stringify(value));
export const settingsOf = (parameters) => Object.entries(parameters).map(([key, value]) => `${key} ${valueOf(value)}`).join(", ");
