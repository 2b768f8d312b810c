// The setting for gym:// links on this machine: they open this page, or nothing.
import {action, el, mayChange, post, replace} from "../static/app.js";

// linksPanel(answer of "links") -> element
export function linksPanel(first) {
  const node = el("div", {class: "below"});
  function draw({is_registered: isOn}) {
    replace(node, el("p", {role: "status"}, isOn ? "Clicking an invite opens this page, which asks before anything is sent." : "Clicking an invite does nothing yet. It can open this page, which asks before anything is sent."),
      mayChange() && action(isOn ? "Stop opening invites" : "Open invites with this page", async () => draw(await post("links", {is_registered: !isOn}))));
  }
  draw(first);
  return node;
}
