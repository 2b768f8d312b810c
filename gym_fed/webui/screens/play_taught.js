// The taught answers: the preferences of each model in use, and the variant that is created from them.
import {action, api, copyable, count, el, failed, mayChange, post, replace, say, section, table} from "../static/app.js";

// `bases()` returns the models in use; `refresh()` reloads the list of models; `compareWith(base, variant)` compares the two.
export function taughtPanel({bases, refresh, compareWith}) {
  const node = el("div", {class: "below"});
  const draw = async () => {
    try {
      const found = await Promise.all(bases().map(async (base) => ({base, ...(await api(`play/taught?base=${encodeURIComponent(base)}`))})));
      replace(node, found.filter(({total}) => total).map((one) => drawBase(one)));
    } catch (error) { replace(node, failed(error, draw)); }
  };

  function drawBase({base, file, total, rows}) {
    const name = el("input", {id: `variant-${base}`, value: names.get(base) || "taught", maxlength: 64, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*", oninput: () => { names.set(base, name.value); drawCommand(); }});
    const command = el("div"), job = jobs.get(base) || el("div");
    jobs.set(base, job);
    const drawCommand = async () => {
      const given = name.value;
      const {command: text} = await api(`play/variant-command?${new URLSearchParams({base, name: given})}`);
      if (name.value === given) replace(command, copyable(text));
    };
    drawCommand();
    const make = async () => {
      if (!/^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/.test(name.value)) throw new Error("Use letters, digits, dots, dashes and underscores");
      const {jobPanel} = await import("./jobs.js");
      const variant = name.value, begun = await post("play/variant", {base, name: variant});
      replace(job, jobPanel(begun.id, {after: async (ended) => {
        if (ended.exit_code !== 0) return;
        await refresh();
        say(`The variant ${variant} is ready`);
        job.append(el("p", {class: "row"}, el("button", {type: "button", class: "primary", onclick: () => compareWith(base, variant)}, `Compare ${base} with ${base}:${variant}`)));
      }}));
    };
    return section(`Taught to ${base}`,
      el("p", {class: "quiet"}, `${count(total, "answer")} in `, el("code", {}, file), total < 8 && ". From 8 on, some are held out to measure the variant."),
      el("details", {}, el("summary", {}, "Show them"), table([
        {name: "Prompt", class: "reason", of: (row) => (typeof row.prompt === "string" ? row.prompt : row.prompt.map((turn) => `${turn.role}: ${turn.content}`).join("\n"))},
        {name: "Better", class: "reason", of: (row) => row.chosen},
        {name: "Worse", class: "reason", of: (row) => row.rejected},
        {name: "", of: (row) => mayChange() && action("Remove", async () => { await post(`play/taught?${new URLSearchParams({base, id: row.id})}`, {}, "DELETE"); await draw(); })},
      ], rows, {label: `Taught to ${base}`})),
      mayChange() && el("div", {class: "row"}, el("label", {for: name.id}, "Name of the variant"), name, action("Make a variant", make, {primary: true})),
      command, job);
  }

  const names = new Map(), jobs = new Map();
  return {node, draw};
}
