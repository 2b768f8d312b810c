// Data files below the folder, the registry of datasets, and the catalogue of named datasets.
import {action, ago, api, bytes, copyable, count, el, empty, failed, loading, mayChange, number, pathUrl, post, replace, say, section, table} from "../static/app.js";

export const title = "Data";

export async function show(root) {
  const registry = el("div", {}, loading()), catalogue = el("div");
  const {files, total, folder} = await api("data");
  root.append(
    el("header", {}, el("h1", {}, "Data"), el("p", {class: "quiet small mono"}, folder)),
    filesSection(files, total),
    section("Registry", registry),
    el("details", {ontoggle: (event) => event.target.open && !catalogue.childNodes.length && showCatalogue(catalogue)}, el("summary", {}, "Catalogue of datasets that a config can use by name"), catalogue));
  await showRegistry(registry);
}

function filesSection(files, total) {
  const columns = [
    {name: "File", of: (file) => el("a", {href: `/data/${pathUrl(file.name)}`}, file.name), class: "reason"},
    {name: "Size", of: (file) => bytes(file.bytes), number: true},
    {name: "Changed", of: (file) => ago(file.modified), number: true},
  ];
  const none = empty("There is no data file below this folder.", el("p", {}, "Rows are read from .jsonl, .json, .csv and .parquet files. Copy one here, or make one:"), copyable("gym data generate train.jsonl --task reverse"));
  if (!files.length) return section("Files", none);
  const {field, holder} = filtered("Filter files", files, (file) => file.name, (shown) => table(columns, shown, {label: "Data files", none: "No matching files."}));
  return el("section", {}, el("div", {class: "spread"}, el("h2", {}, "Files"), field), holder,
    total > files.length && el("p", {class: "quiet"}, `The first ${number(files.length)} of ${count(total, "file")}.`));
}

function filtered(label, rows, textOf, draw) {
  const holder = el("div", {}, draw(rows));
  const field = el("input", {type: "search", placeholder: label, "aria-label": label, oninput: () => {
    const wanted = field.value.toLowerCase();
    replace(holder, draw(rows.filter((row) => textOf(row).toLowerCase().includes(wanted))));
  }});
  return {field, holder};
}

async function showRegistry(holder) {
  let found;
  try { found = await api("data/registry"); } catch (error) { replace(holder, failed(error, () => showRegistry(holder))); return; }
  const pull = (row) => action("Pull", async () => {
    const job = await post("data/pull", {reference: `${row.name}@${row.version}`});
    say(`Pulling ${row.name} into ${job.folder}.`);
  });
  replace(holder, el("p", {class: "quiet small mono"}, found.store), table([
    {name: "Dataset", of: (row) => `${row.name}@${row.version}`, class: "mono"},
    {name: "Licence", of: (row) => row.licence},
    {name: "What it is", of: (row) => row.description, class: "reason"},
    {name: "Files", of: (row) => row.files.length, number: true},
    {name: "Size", of: (row) => bytes(row.files.reduce((sum, file) => sum + file.num_bytes, 0)), number: true},
    mayChange() && {name: "", of: pull},
  ].filter(Boolean), found.datasets, {label: "Registry", none: "No datasets in this store yet. gym data push adds one, with a licence."}));
}

async function showCatalogue(holder) {
  replace(holder, loading());
  const {entries} = await api("data/catalogue");
  const {field, holder: rows} = filtered("Filter the catalogue", entries, (row) => `${row.name} ${row.about} ${row.place}`, (shown) => table([
    {name: "Name", of: (row) => row.name, class: "mono"},
    {name: "What it is", of: (row) => row.about, class: "reason"},
    {name: "Format", of: (row) => row.format},
    {name: "Rows", of: (row) => number(row.rows), number: true},
    {name: "Size", of: (row) => bytes(row.bytes), number: true},
    {name: "Licence", of: (row) => row.licence || "not stated"},
    {name: "Place", of: (row) => row.place, class: "mono"},
  ], shown, {label: "Catalogue", none: "No matching datasets."}));
  replace(holder, el("div", {class: "stack"}, el("p", {class: "quiet"}, "In a config: ", el("code", {}, "data: [{name: NAME}]"), ". Licences and sizes that are uncertain are omitted."), field, rows));
}
