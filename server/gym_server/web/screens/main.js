// The hub's dashboard; each screen is a module that is loaded when it is first shown.
import {start} from "../static/app.js";

const screen = (name) => () => import(`./${name}.js`);

start({
  links: [["/", "Hub"], ["/members", "Members"], ["/rounds", "Rounds"], ["/contributors", "Contributors"], ["/model", "Model"], ["/privacy", "Privacy"],
    ["/ledger", "Ledger"], ["/invites", "Invites"], ["/variants", "Variants"], ["/health", "Health"]],
  screens: [
    ["/", screen("home")],
    ["/members", screen("members")],
    ["/rounds", screen("rounds")],
    ["/rounds/:round", screen("round")],
    ["/contributors", screen("contributors")],
    ["/contributors/:id", screen("contributor")],
    ["/model", screen("model")],
    ["/privacy", screen("privacy")],
    ["/ledger", screen("ledger")],
    ["/invites", screen("invites")],
    ["/variants", screen("variants")],
    ["/health", screen("health")],
  ],
});
