// Ask the search of a built site, with the very worker that runs in a reader's browser.
//
//   node tools/search_site.mjs SITE QUERY ...
//
// prints a JSON object: of each query the addresses of the pages that are found, best first.
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const [site, ...queries] = process.argv.slice(2);
const workers = join(site, "assets", "javascripts", "workers");
const name = readdirSync(workers).find((file) => /^search\..*\.js$/.test(file));
const { config, docs } = JSON.parse(readFileSync(join(site, "search", "search_index.json"), "utf8"));

let answer; // resolves the message that the worker is working on
let receive;
const context = vm.createContext({
  console,
  addEventListener: (_, listener) => (receive = listener),
  postMessage: (message) => answer(message),
});
context.self = context;
vm.runInContext(readFileSync(join(workers, name), "utf8"), context);

const ask = (message) => new Promise((resolve) => ((answer = resolve), receive({ data: message })));
await ask({ type: 0, data: { config, docs, options: {} } });
const found = {};
for (const query of queries) {
  const { data } = await ask({ type: 2, data: query });
  found[query] = data.items.map((group) => group.find((item) => !item.location.includes("#"))?.location ?? group[0].location);
}
console.log(JSON.stringify(found));
