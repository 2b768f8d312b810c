// The workbench's screens, each a module that is loaded when it is first shown.
import {start} from "../static/app.js";

const screen = (name) => () => import(`./${name}.js`);

start({
  links: [["/train", "Train"], ["/runs", "Runs"], ["/play", "Play"], ["/data", "Data"], ["/models", "Models"], ["/tune", "Tune"],
    ["/evals", "Evals"], ["/join", "Join"]],
  screens: [
    ["/", screen("train")],
    ["/runs", screen("runs")],
    ["/runs/*path", screen("run")],
    ["/jobs", screen("jobs")],
    ["/jobs/:id", screen("jobs")],
    ["/train", screen("train")],
    ["/play", screen("play")],
    ["/data", screen("data")],
    ["/data/*name", screen("dataset")],
    ["/models", screen("models")],
    ["/tune", screen("tune")],
    ["/evals", screen("evals")],
    ["/join", screen("join")],
  ],
});
