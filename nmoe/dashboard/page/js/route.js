// The address of what is shown: runs, view and its settings lie behind the #, so that a link leads to the same.

export function route() {
  const query = new URLSearchParams(location.hash.replace(/^#\/?\??/, ""));
  const runs = query.getAll("run");
  query.delete("run");
  const settings = Object.fromEntries(query);
  const view = settings.view ?? (runs.length > 1 ? "curves" : "overview");
  delete settings.view;
  return { runs, view: runs.length ? view : "list", settings };
}

/** Returns the link to a view of runs. */
export function link(runs, view, settings = {}) {
  const query = new URLSearchParams(runs.map((run) => ["run", run]));
  query.set("view", view);
  for (const [name, value] of Object.entries(settings)) {
    if (value !== undefined && value !== null && value !== "") query.set(name, value);
  }
  return `#/?${query}`;
}

/** Keeps a view's settings in the address, without another entry in the history. */
export function keep(settings) {
  const { runs, view } = route();
  history.replaceState(null, "", link(runs, view, settings));
}
