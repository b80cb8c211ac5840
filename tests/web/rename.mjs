// Reads a stream whose requests are renamed, and prints their names and the differences from the snapshots.

import { readFileSync } from "node:fs";

import { History, renameRequests } from "../../octavo/web/history.js";

const lines = readFileSync(0, "utf8").trim().split("\n").map((line) => JSON.parse(line));
renameRequests(lines, Number(process.argv[2]));
console.error = () => {}; // The differences are printed below.
const names = [];
const history = new History((event) => event.kind === "arrived" && names.push(event.name));
history.add(lines);
const { checks } = history;
console.log(JSON.stringify({ names, checks: checks.length, differences: checks.flatMap(({ differences }) => differences) }));
