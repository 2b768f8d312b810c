// A place to drop a file of rows on, or to choose one; it is sent to the server in parts.
import {ApiError, api, el, mayChange, message, post, progress, replace, session} from "./app.js";

const SUFFIXES = ".jsonl,.json,.ndjson,.csv,.tsv,.parquet,.txt,.gz";

// dropArea({id, taken}) -> element; taken(name) is called with the name by which the server knows the file.
export function dropArea({id, taken}) {
  const bar = el("div");
  const input = el("input", {type: "file", id, accept: SUFFIXES, disabled: !mayChange(), onchange: () => input.files.length && take(input.files[0])});
  const node = el("div", {class: "drop", ondragover: (event) => { event.preventDefault(); node.dataset.over = "1"; }, ondragleave: () => { delete node.dataset.over; }, ondrop: (event) => {
    event.preventDefault();
    delete node.dataset.over;
    if (mayChange() && event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
  }}, el("label", {for: id}, "Drop a file of rows here, or choose one: JSONL, JSON, CSV, TSV, Parquet or text"), input, bar);

  async function take(file) {
    try {
      const name = await upload(file, (done) => replace(bar, progress(done, file.size, `Uploading ${file.name}`)));
      replace(bar);
      await taken(name);
    } catch (error) { replace(bar, el("p", {class: "problem", role: "alert"}, error instanceof ApiError ? message(error) : `${file.name} could not be read.`)); } finally { input.value = ""; }
  }

  return node;
}

// Sends a file in parts, and returns its name on the server.
async function upload(file, report) {
  const {id, part_bytes: size} = await post("data/uploads", {name: file.name, bytes: file.size});
  let name = null;
  for (let at = 0; at < file.size; at += size) {
    report(at);
    ({name} = await api(`data/uploads/${id}?offset=${at}`, {method: "PUT", body: await file.slice(at, at + size).arrayBuffer(), headers: {"Content-Type": "application/octet-stream", "X-CSRF-Token": session.csrf}}));
  }
  return name;
}
