// The models, variants and versions on this machine: describe, export, encode, merge, rename and delete them.
import {action, ago, api, bytes, copyable, el, empty, facts, failed, loading, mayChange, message, navigate, post, quoted, replace, say, section, table} from "../static/app.js";
import {jobPanel} from "./jobs.js";

export const title = "Models";

const KINDS = {package: "comes with gym-fed", cache: "Hugging Face cache", run: "run", folder: "folder", adapter: "adapter", gguf: "GGUF file"};
const MOVABLE = ["run", "folder", "adapter", "gguf"];
const play = (label) => `/play?${new URLSearchParams({a: label})}`;
const slug = (text) => text.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+|[-.]+$/g, "") || "model";

export async function show(root, parameters, query) {
  const [found, kinds] = await Promise.all([api("models"), api("models/kinds")]);
  const chosen = query.get("model"), model = found.models.find((one) => one.id === chosen);
  const again = () => navigate("/models");
  if (chosen) {
    replace(root, model ? await oneModel(model, found, kinds, again) : empty(`“${chosen}” is no longer on this machine.`, el("a", {href: "/models"}, "All models")));
    return;
  }
  const registry = el("div", {}, loading());
  replace(root,
    el("header", {}, el("h1", {}, "Models"), el("span", {class: "quiet"}, `${bytes(found.free_bytes)} free in ${found.folder}`)),
    section("On this machine", table([
      {name: "Model", of: (one) => el("a", {class: "name", href: `/models?${new URLSearchParams({model: one.id})}`}, one.id)},
      {name: "Kind", of: (one) => KINDS[one.kind] || one.kind},
      {name: "Licence", of: (one) => one.licence || "not stated"},
      {name: "Size", number: true, of: (one) => bytes(one.bytes)},
      {name: "Changed", number: true, of: (one) => ago(one.changed_at)},
      {name: "", of: (one) => el("a", {href: play(one.id), "aria-label": `Chat with ${one.id}`}, "Chat")},
    ], found.models, {label: "Models"})),
    found.models.length < 2 && empty("Models that you train are listed here when they are finished.", el("a", {class: "button", href: "/train"}, "Train one")),
    section("Variants", variants(found, kinds, () => show(root, parameters, query))),
    mayChange() && found.models.length > 2 && section("Merge", el("p", {class: "quiet"}, "Combine fine-tunes of one base into one delta, with a merge method or a robust rule."), mergeForm(found, kinds)),
    section("Registry", registry));
  await showRegistry(registry);
}

async function showRegistry(registry) {
  replace(registry, loading());
  try {
    const {models} = await api("models/registry");
    replace(registry, table([
      {name: "Model", of: (one) => one.name},
      {name: "Newest version", number: true, of: (one) => one.version},
      {name: "Size", number: true, of: (one) => bytes(one.bytes)},
      {name: "State", of: (one) => one.problem || "whole"},
      {name: "Fetch", class: "mono", of: (one) => `gym models pull ${one.name} -o FOLDER`},
    ], models, {label: "Registry", none: "The registry has no models yet. gym models push adds one."}));
  } catch (error) { replace(registry, failed(error, () => showRegistry(registry))); }
}

function variants(found, kinds, again) {
  const place = el("div"), named = (name) => found.models.filter((one) => one.name === name);
  return el("div", {}, table([
    {name: "Variant", of: (one) => el("span", {class: "name"}, one.name)},
    {name: "Base", of: (one) => one.base_model},
    {name: "Revision", number: true, of: (one) => one.revision},
    {name: "Owner", of: (one) => one.owner},
    {name: "Signed by", of: (one) => one.signed_by || "nobody"},
    {name: "Size", number: true, of: (one) => bytes(one.size_bytes)},
    {name: "Changed", number: true, of: (one) => ago(one.updated_at)},
    {name: "", of: (one) => el("span", {class: "row"},
      named(one.base_model)[0] && el("a", {href: play(`${named(one.base_model)[0].id}:${one.name}`), "aria-label": `Chat with ${one.name}`}, "Chat"),
      mayChange() && named(one.base_model)[0] && el("button", {type: "button", class: "plain", onclick: () => { replace(place, el("h3", {}, `Export ${one.name}`), exportForm(named(one.base_model)[0], kinds, one.name)); place.querySelector("select").focus(); }}, "Export"),
      mayChange() && action("Delete", async () => { await post("models/delete-variant", {name: one.name}); say(`${one.name} is deleted`); await again(); }, {confirm: `Delete the variant ${one.name}, revision ${one.revision}?`}))},
  ], found.variants, {label: "Variants", none: "No variants yet. Teach answers in Play, or run gym variant create."}), place);
}

async function oneModel(model, found, kinds, again) {
  const about = await api(`models/one?${new URLSearchParams({model: model.id})}`);
  const others = found.models.filter((one) => one.id !== model.id && one.kind !== "gguf");
  return [
    el("header", {}, el("div", {class: "heading"}, el("a", {class: "crumb", href: "/models"}, "Models"), el("h1", {}, model.id)), el("a", {class: "button primary", href: play(model.id)}, "Chat")),
    facts([["Kind", KINDS[model.kind] || model.kind], ["Size", bytes(model.bytes)], ["Licence", model.licence || "not stated"], ["Changed", ago(model.changed_at)],
      ["In use", about.uses.join("; ") || "no"], ["Base of", about.dependents.join(", ") || "nothing here"]]),
    mayChange() && section("Export", exportForm(model, kinds, null)),
    mayChange() && MOVABLE.includes(model.kind) && el("section", {id: "share"}, el("h2", {}, "Share"), shareForm(model)),
    mayChange() && others.length > 0 && model.kind !== "gguf" && section("Encode as a delta", el("p", {class: "quiet"}, "The difference from its base in few bits, the format of updates and variants."), encodeForm(model, others, kinds, about.base)),
    mayChange() && MOVABLE.includes(model.kind) && section("Rename or delete", changes(model, about, again)),
  ];
}

function changes(model, about, again) {
  const name = el("input", {id: "new-name", value: model.name, maxlength: 200});
  const warning = about.dependents.length ? `${model.id} is the base of ${about.dependents.join(", ")}, which cannot be loaded afterwards. ` : "";
  const confirmed = about.dependents.length > 0;
  return el("div", {class: "row"}, el("label", {for: "new-name"}, "Name"), name,
    action("Rename", async () => {
      const to = await post("models/rename", {model: model.id, to: name.value, confirmed});
      say(`Renamed to ${to.model}`);
      navigate(`/models?${new URLSearchParams({model: to.model})}`);
    }, {confirm: warning && `${warning}Rename it?`}),
    action("Delete", async () => { await post("models/delete", {model: model.id, confirmed}); say(`${model.id} is deleted`); again(); }, {confirm: `${warning}Delete ${model.id} and everything in its folder (${bytes(model.bytes)})?`}));
}

// ---- actions: a form, its command, its job ----

function choice(id, label, names, {value = "", change = () => {}, help = ""} = {}) {
  const node = el("select", {id, onchange: change}, names.map((one) => (Array.isArray(one) ? el("option", {value: one[0]}, one[1]) : el("option", {value: one}, one))));
  if (value) node.value = value;
  return {node, field: el("div", {class: "field"}, el("label", {for: id}, label), node, help && el("span", {class: "help"}, help))};
}

// `body()` returns the request, or null while an input is missing; its command is shown before it is started.
function doing(fields, body, start, more = null) {
  const command = el("div"), job = el("div"), problem = el("p", {class: "problem", role: "alert"});
  let turn = 0;
  const preview = async () => {
    const mine = ++turn, wanted = body();
    if (!wanted) { replace(command); replace(problem); return; }
    try {
      const {command: text} = await post("models/do", {do: wanted, preview: true});
      if (mine === turn) { replace(command, copyable(text)); replace(problem); }
    } catch (error) { if (mine === turn) { replace(command); replace(problem, message(error)); } }
  };
  const node = el("div", {class: "doing", onchange: preview}, el("div", {class: "doing-fields"}, fields), more, command, problem,
    el("div", {}, action(start, async () => {
      const wanted = body();
      if (!wanted) throw new Error("Something is missing");
      const begun = await post("models/do", {do: wanted});
      replace(job, jobPanel(begun.job.id, {after: (ended) => { say(ended.exit_code === 0 ? `${wanted.output} is written` : `${start} failed`); preview(); }}));
    }, {primary: true})), job);
  queueMicrotask(preview);
  return node;
}

const outputField = (id, value) => {
  const node = el("input", {id, value, maxlength: 1024, class: "mono"});
  return {node, field: el("div", {class: "field"}, el("label", {for: id}, "New file or folder"), node, el("span", {class: "help"}, "below the workbench’s folder"))};
};

function exportForm(model, kinds, variant) {
  const key = variant ? `variant-${variant}` : "model", note = el("p", {class: "quiet"}), quantization = el("div");
  const named = `exports/${slug(variant ? `${model.name}-${variant}` : model.name)}`;
  const format = choice(`format-${key}`, "Format", kinds.formats.map((one) => one.format), {value: "huggingface", change: () => draw()});
  const output = outputField(`output-${key}`, "");
  let few = null;
  const draw = () => {
    const row = kinds.formats.find((one) => one.format === format.node.value);
    few = row.quantizations.length ? choice(`few-${key}`, "Numbers", row.quantizations) : null;
    replace(quantization, few && few.field);
    output.node.value = `${named}-${row.format}${row.suffix}`;
    replace(note, row.writes, row.read_by && ` Read back and compared by ${row.read_by}.`, row.missing.length > 0 && el("strong", {}, ` Not installed here: ${row.missing.join(", ")}.`));
  };
  draw();
  return doing([format.field, quantization, output.field], () => ({action: "export", model: model.id, variant, format: format.node.value, quantization: few ? few.node.value : null, output: output.node.value}), "Export", note);
}

function shareForm(model) {
  const name = slug(model.name).toLowerCase();
  const output = el("input", {id: "share-name", value: `me/${name}`, maxlength: 129, class: "mono"}), licence = el("input", {id: "share-licence", placeholder: "not stated", maxlength: 64});
  return doing([el("div", {class: "field"}, el("label", {for: "share-name"}, "Name in the registry"), output), el("div", {class: "field"}, el("label", {for: "share-licence"}, "Licence"), licence, el("span", {class: "help"}, "such as Apache-2.0"))],
    () => ({action: "share", model: model.id, output: output.value.trim(), licence: licence.value.trim() || null}), "Publish",
    el("div", {class: "stack"}, el("p", {class: "quiet"}, "A version of the registry is signed with your key and stays on this machine, or where GYM_MODELS points. To put the model on the Hugging Face Hub:"), copyable(`gym models push ${name} ${quoted(model.id)} --to hf -o exports/${name}-hub --repo OWNER/${name}`)));
}

function encodeForm(model, others, kinds, own) {
  const base = choice("encode-base", "Base", others.map((one) => one.id), {value: own || (others.some((one) => one.id === "gym-nano") ? "gym-nano" : "")});
  const codec = choice("encode-codec", "Codec", kinds.codecs, {value: "compact"}), output = outputField("encode-output", `deltas/${slug(model.name)}.gymdelta`);
  return doing([base.field, codec.field, output.field], () => ({action: "encode", base: base.node.value, tuned: model.id, codec: codec.node.value, output: output.node.value}), "Encode");
}

function mergeForm(found, kinds) {
  const tunes = found.models.filter((one) => MOVABLE.includes(one.kind) && one.kind !== "gguf"), chosen = new Set();
  const base = choice("merge-base", "Base of all", found.models.filter((one) => one.kind !== "gguf").map((one) => one.id), {value: "gym-nano"});
  const rule = choice("merge-rule", "Rule", kinds.rules, {help: "gym soup rules explains each"}), output = outputField("merge-output", "deltas/soup.gymdelta");
  const ticks = el("fieldset", {class: "ticks"}, el("legend", {}, "Merge these (two or more)"), tunes.map((one) => el("label", {class: "tick"}, el("input", {type: "checkbox", onchange: (event) => { if (event.target.checked) chosen.add(one.id); else chosen.delete(one.id); }}), ` ${one.id}`)));
  return doing([base.field, rule.field, output.field], () => (chosen.size < 2 ? null : {action: "merge", base: base.node.value, updates: [...chosen], rule: rule.node.value, output: output.node.value}), "Merge", ticks);
}
