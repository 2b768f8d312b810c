// An answer token by token, with the probability of each.
import {el, replace} from "../static/app.js";

// Weight and underline show how likely a token was. Its alternatives are shown in a card while the pointer is over it,
// and while it has the focus (arrow keys move it).
export function tokenView(tokens) {
  const line = el("p", {class: "said tokens", role: "group", "aria-label": "Tokens; the arrow keys move, and show the alternatives of each"});
  const about = el("div", {class: "about", "aria-live": "polite"}, legend());
  const card = el("div", {class: "token-card", hidden: true, "aria-hidden": "true"});
  const root = el("div", {class: "token-view", onmouseleave: () => { card.hidden = true; }}, line, about, card);
  const add = (text, more) => {
    for (const token of more) line.append(node(token, line.childElementCount === 0));
    if (!more.length && text) line.append(text);
  };
  const node = (token, isFirst) => {
    const share = Math.exp(token.logprob);
    return el("span", {class: `token ${level(share)}`, role: "button", tabindex: isFirst ? 0 : -1, "aria-label": `${spoken(token.token)}, ${percent(share)}`, onfocus: (event) => focus(event.target, token), onmouseenter: (event) => hover(event.target, token), onmouseleave: () => { card.hidden = true; }, onclick: (event) => event.target.focus(), onkeydown: move}, visible(token.token));
  };
  const focus = (target, token) => {
    for (const other of line.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
    target.tabIndex = 0;
    replace(about, alternatives(token));
  };
  const alternatives = (token) => [el("p", {class: "small"}, el("code", {}, spoken(token.token)), ` had ${percent(Math.exp(token.logprob))}. The most likely were:`),
    el("ol", {class: "alternatives"}, token.top_logprobs.map((one) => alternative(one, one.token === token.token)))];
  const hover = (target, token) => {
    replace(card, alternatives(token));
    card.hidden = false;
    card.style.top = `${target.offsetTop + target.offsetHeight + 2}px`;
    card.style.left = `${Math.max(0, Math.min(target.offsetLeft, root.clientWidth - card.offsetWidth))}px`;
  };
  const move = (event) => {
    const {target} = event, to = {ArrowRight: target.nextElementSibling, ArrowLeft: target.previousElementSibling, Home: line.firstElementChild, End: line.lastElementChild}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    to?.focus();
  };
  add("", tokens);
  return {root, add};
}

const LEVELS = [["sure", 0.9, "90% and more"], ["likely", 0.5, "50%"], ["open", 0.2, "20%"], ["rare", 0, "less"]];
const level = (share) => LEVELS.find(([, least]) => share >= least)[0];
const percent = (share) => `${(100 * share).toFixed(share >= 0.1 ? 0 : 1)}%`;
const visible = (text) => text.replaceAll("\n", "↵\n");
const spoken = (text) => JSON.stringify(text);

function legend() {
  return el("p", {class: "legend"}, LEVELS.map(([name, , text]) => el("span", {class: "key"}, el("span", {class: `token ${name}`}, "token"), text)));
}

function alternative(one, isTaken) {
  const share = Math.exp(one.logprob), bar = el("span", {class: "bar", "aria-hidden": "true"}), fill = el("span");
  fill.style.width = `${100 * share}%`;
  bar.append(fill);
  return el("li", {class: isTaken ? "taken" : ""}, el("code", {}, spoken(one.token)), bar, el("span", {class: "number"}, percent(share)));
}
