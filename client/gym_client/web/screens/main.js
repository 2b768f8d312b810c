// The contributor's pages: joining and contributing, and removing the client from this machine.
import {start} from "../static/app.js";

const screen = (name) => () => import(`./${name}.js`);

start({
  links: [["/join", "Contribute"], ["/uninstall", "Uninstall"]],
  screens: [
    ["/", screen("join")],
    ["/join", screen("join")],
    ["/uninstall", screen("uninstall")],
  ],
});
