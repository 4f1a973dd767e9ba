// The state of the rollouts page as the query of its URL, and back: step, group, sample, colour, the item followed through
// training, and the filter. Pure; knows no document and no requests.

/**
 * @typedef {{text: string, reward_min: string, reward_max: string, length_min: string, length_max: string,
 *            first_step: string, last_step: string, item: string, finding: string, sort: string,
 *            flag: string[], without: string[]}} Filter
 * @typedef {{step: number|null, follow: boolean, group: number|null, row: number|null, colour: string, signal: boolean,
 *            visits: string|null, picks: number[], filter: Filter}} State
 */

const FIELDS = [
  "text",
  "reward_min",
  "reward_max",
  "length_min",
  "length_max",
  "first_step",
  "last_step",
  "item",
  "finding",
  "sort",
];

/** @param {URLSearchParams} search @returns {State} */
export function readState(search) {
  const whole = (name) => (/^\d{1,15}$/.test(search.get(name) ?? "") ? Number(search.get(name)) : null);
  const filter = noFilter();
  for (const name of FIELDS) filter[name] = search.get(name) ?? "";
  filter.flag = search.getAll("flag");
  filter.without = search.getAll("without");
  const state = {
    step: whole("step"),
    follow: search.has("follow"),
    group: whole("group"),
    row: whole("row"),
    colour: search.get("colour") ?? "advantage",
    signal: search.has("signal"),
    visits: search.get("visits") || null,
    picks: search.getAll("pick").map(Number).filter(Number.isInteger),
    filter,
  };
  const isOfOneStep = state.step !== null && state.group === null && state.visits === null && isFiltering(filter);
  if (isOfOneStep && !filter.first_step && !filter.last_step) {
    state.filter.first_step = state.filter.last_step = String(state.step); // a link to "the truncated ones of step 20"
  }
  return state;
}

/** Whether a filter is on and no sample is chosen yet: then the shown step is not part of the query. */
const isUnsettled = ({ group, visits, filter }) => group === null && visits === null && isFiltering(filter);

/** The state as the whole query of the address. @param {State} state @returns {Record<string, unknown>} */
export const writeState = (state) => ({
  step: state.follow || isUnsettled(state) ? null : state.step,
  follow: state.follow ? 1 : null,
  group: state.follow ? null : state.group,
  row: state.follow ? null : state.row,
  colour: state.colour === "advantage" ? null : state.colour,
  signal: state.signal ? 1 : null,
  visits: state.visits,
  pick: state.picks,
  ...state.filter,
});

/** Whether anything is asked for; an order over all rollouts is a question too. @param {Filter} filter */
export const isFiltering = (filter) => Object.values(filter).some((value) => value.length > 0);

/** No filter at all. @returns {Filter} */
export const noFilter = () =>
  /** @type {Filter} */ ({ ...Object.fromEntries(FIELDS.map((name) => [name, ""])), flag: [], without: [] });

/**
 * The parts of a filter as labels, each with the filter without it.
 * @param {Filter} filter
 * @param {string} [order] the order in words
 * @returns {{label: string, without: Filter}[]}
 */
export function partsOf(filter, order = filter.sort) {
  const parts = [];
  const add = (label, changes) => parts.push({ label, without: { ...filter, ...changes } });
  for (const name of ["text", "item", "finding"]) if (filter[name]) add(`${name}: ${filter[name]}`, { [name]: "" });
  for (const [name, low, high] of [
    ["reward", "reward_min", "reward_max"],
    ["tokens", "length_min", "length_max"],
    ["step", "first_step", "last_step"],
  ]) {
    if (filter[low] || filter[high])
      add(`${name} ${filter[low] || "…"} to ${filter[high] || "…"}`, { [low]: "", [high]: "" });
  }
  for (const name of ["flag", "without"]) {
    for (const flag of filter[name]) {
      const label = (name === "flag" ? "" : "not ") + flag.replace("_", " ");
      add(label, { [name]: filter[name].filter((other) => other !== flag) });
    }
  }
  if (filter.sort) add(order, { sort: "" });
  return parts;
}
