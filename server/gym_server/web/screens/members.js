// The members screen: versions with their contributors, how to join, and what leaves a contributor's machine.
import {ago, api, copyable, el, figure, number, section, signed, siteUrl, table} from "../static/app.js";
import {chart} from "../static/charts.js";
import {newestPanel} from "./model.js";
import {change, helpers, noLoss, refreshOn} from "./parts.js";

export const title = "Members";

export async function show(root) {
  const about = await api("members");
  const figures = el("div", {class: "figures"}), made = el("div"), groups = el("p", {class: "sentence"}), newest = newestPanel();
  const curve = chart({title: "Held-out loss by version", xLabel: "version", height: 220});

  function draw({model: found, losses: points}) {
    const first = points[0], last = points.at(-1);
    figures.replaceChildren(figure("Version", number(found.version), found.version ? `of ${found.base_model}` : "the base model"),
      figure("Held-out loss", last ? number(last[1]) : null, last && last !== first ? `${signed(last[1] - first[1])} since version ${first[0]}` : ""));
    curve.set([{name: "held-out loss", points}], {none: noLoss(about.is_measured)});
    groups.hidden = !found.groups;
    groups.textContent = found.groups ? `${found.groups[0].toUpperCase()}${found.groups.slice(1)}.` : "";
    newest.set(found.newest);
    made.replaceChildren(table([
      {name: "Version", number: true, of: (one) => one.height},
      {name: "With the help of", class: "reason", of: helpers},
      {name: "Change of the loss", number: true, of: (one) => change(one.heldout_before, one.heldout_after)},
      {name: "Made", of: (one) => ago(one.committed_at)},
    ], found.versions, {label: "Newest versions", none: "No version yet: the first committed round makes one."}));
  }

  root.append(el("header", {}, el("h1", {}, about.name), el("p", {class: "quiet"}, "One language model that its members improve together.")), figures,
    el("div", {class: "columns"}, curve.node, section("Newest versions", made, groups, el("p", {}, el("a", {href: "/model"}, "All versions"), " · ", el("a", {href: "/contributors"}, "Your own contribution: find your name")))),
    newest.node,
    el("div", {class: "columns"}, join(about), section("What leaves your machine", el("ul", {}, about.leaves.map((line) => el("li", {}, line))), el("p", {}, el("strong", {}, "Never: "), `${about.stays}.`), el("p", {class: "small quiet"}, "The client shows these terms with the figures of your machine, and asks, before anything is sent."))),
    address(about));
  draw(about);
  refreshOn(["version"], async () => draw(await api("members")));
  refreshOn(["newest-model"], async () => { if (newest.isOn()) newest.set(await api("model/newest")); });
}

function join({install, needs_wheel: isSent, link, enrolment}) {
  const how = {invite: "Ask the coordinator for an invite, and paste it on the page that opens.", "allow-list": "Send the coordinator the id that the page shows, and then give it the hub’s address.", open: "Paste this link on the page that opens:"}[enrolment];
  return section("Join", el("p", {}, "Install the client and open its page, with these two lines in a terminal:"), copyable(install.join("\n")), isSent && el("p", {class: "quiet"}, "WHEEL is the file that the coordinator sends you."), el("p", {}, how), link && copyable(link), link?.startsWith("gym://") && el("p", {class: "small"}, el("a", {href: link}, "Open it with gym-client"), el("span", {class: "quiet"}, ", once ", el("code", {}, "gym-client install-links"), " was run there")));
}

// The address of this page for use on a website, or how to configure it.
function address({public_url: url}) {
  const page = url && `${url.replace(/\/$/, "")}/members`;
  return section("Put this page on a website", page ? copyable(`<a href="${page}">${page}</a>`) : el("p", {class: "quiet"}, "This page is at ", el("code", {}, siteUrl("/members")), ". With ", el("code", {}, "dashboard: {public: true, public_url: https://…}"), " in gym-server.yaml, everybody can see it, and invites name it."));
}
