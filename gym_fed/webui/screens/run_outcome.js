// The outcome of a run: what was gained and lost, three prompts before and after, and what to do next.
import {action, count, el, figure, mayChange, navigate, number, post, section, signed} from "../static/app.js";

// The card of a finished run, from the check that `gym train` made at its end.
export function outcome(run) {
  const {check} = run, model = new URLSearchParams({model: run.base});
  return section("What was gained and what was lost",
    check ? measured(check) : el("p", {class: "quiet"}, "It was not measured: the run was started with --no-check, or written by another program."),
    el("div", {class: "row"},
      run.is_saved && el("a", {class: "button primary", href: `/play?${new URLSearchParams({a: run.base})}`}, "Chat"),
      run.is_saved && run.settings.model && el("a", {class: "button", href: `/play?${new URLSearchParams({a: run.settings.model, b: run.base})}`}, "Compare with its base"),
      run.is_saved && el("a", {class: "button", href: `/models?${model}#share`}, "Share"),
      run.is_saved && el("a", {class: "button", href: `/models?${model}`}, "Export"),
      run.is_saved && mayChange() && run.config && action("Continue", () => goOn(run))));
}

function measured({held_out: held, retention, warnings = [], skipped = [], prompts = [], expected = [], before = [], after = []}) {
  return [
    el("div", {class: "figures"},
      held && figure("Held-out loss, mean of rows", `${number(held.before)} → ${number(held.after)}`, [signed(held.after - held.before), held.stderr !== null && `± ${number(held.stderr, 2)}`, held.num_rows && `on ${count(held.num_rows, "row")} never trained on`].filter(Boolean).join(" ")),
      retention && retention.num_questions > 0 && figure(retention.is_lost ? "Knowledge lost" : "Knowledge kept", `${number(retention.right_before)} → ${number(retention.right_after)}`, `of ${count(retention.num_questions, "ordinary question")} right; ${number(retention.answers_lost)} lost, ${number(retention.right_after - retention.right_before + retention.answers_lost)} won`),
      retention && figure("Loss on ordinary texts", `${number(retention.before)} → ${number(retention.after)}`, `${signed(retention.after - retention.before)} ± ${number(retention.stderr, 2)}`)),
    warnings.map((text) => el("p", {class: "problem"}, text)),
    prompts.map((prompt, at) => el("article", {class: "exchange prompted", "aria-label": `Prompt ${at + 1}`},
      el("div", {class: "asked"}, el("p", {class: "said"}, prompt)),
      el("div", {class: "answers three"}, [["In your rows", expected[at]], ["Before", before[at]], ["After", after[at]]].map(([who, text]) => el("div", {class: "answer"}, el("p", {class: "who"}, who), el("p", {class: "said"}, text || "(nothing)")))))),
    skipped.map((text) => el("p", {class: "small quiet wrap"}, `Not checked: ${text}`))];
}

// The same config, starting from the trained model.
async function goOn(run) {
  const name = `${run.base.replace(/-\d+$/, "")}-${Number(/-(\d+)$/.exec(run.base)?.[1] || 1) + 1}`;
  const before = localStorage.getItem("gym.train.draft");
  if (before && before !== run.config && !window.confirm("Replace your draft in Train?")) return;
  const values = run.is_adapter ? {adapter: run.base} : {model: run.base}; // an adapter is trained further on its base
  const {text: plain} = await post("train/edit", {text: run.config, values: run.is_adapter ? {adapter: null} : {}}); // it may be a list
  const {text} = await post("train/edit", {text: plain, values: {...values, output_dir: name}});
  localStorage.setItem("gym.train.draft", text);
  navigate("/train");
}
