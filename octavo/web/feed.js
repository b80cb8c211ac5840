// The connection to /ws/watch (octavo/serve/endpoints/live_feed.py). It asks for a key if the
// server requires one, and reconnects by itself. A page that is hidden for a while disconnects, so
// that the server and the engine do no work for it.

const STORE = "octavo.key";
let key = sessionStorage.getItem(STORE) || "";

export const authorization = () => (key ? { authorization: `Bearer ${key}` } : {});

const base64url = (text) => btoa(text).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
const untilVisible = () =>
  new Promise((done) => {
    if (!document.hidden) return done();
    document.addEventListener("visibilitychange", () => done(), { once: true });
  });

const HIDDEN_SECONDS = 20; // A hidden page disconnects after this time.
// The server closes the connection with this code if the key is not an administrator's.
const FORBIDDEN = 4403;

function askForKey(why) {
  const dialog = document.getElementById("ask");
  if (why) document.getElementById("ask-why").textContent = `${why} The key stays in this tab.`;
  dialog.showModal();
  return new Promise((done) => {
    document.getElementById("ask-form").onsubmit = (event) => {
      event.preventDefault();
      // A header can contain only these characters.
      key = document.getElementById("key").value.replace(/[^!-~]/g, "");
      sessionStorage.setItem(STORE, key);
      dialog.close();
      done();
    };
    dialog.oncancel = (event) => event.preventDefault();
  });
}

// A browser hides the reason why a WebSocket was refused, so an ordinary request checks the key
// first.
async function waitUntilAdmitted(showStatus) {
  for (;;) {
    const reply = await fetch(address("version"), { headers: authorization(), cache: "no-store" });
    if (reply.ok) return;
    if (reply.status === 401) {
      showStatus("key", "an API key is required");
      await askForKey(key && "The server does not accept this key.");
    } else {
      showStatus(
        "gone",
        reply.status === 429 ? "too many invalid keys: waiting" : `refused: ${reply.status}`,
      );
      await pause(Number(reply.headers.get("retry-after")) || 5);
    }
  }
}

// Returns the URL of a path of the server, also if a proxy offers the server below a path.
export const address = (path) => new URL(path, document.baseURI.replace(/#.*$/, "")).href;

function watch(onState, onLines) {
  const protocols = ["octavo-watch", ...(key ? [`octavo-key.${base64url(key)}`] : [])];
  const socket = new WebSocket(address("ws/watch").replace(/^http/, "ws"), protocols);
  let timer = 0;
  const onVisibilityChange = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(() => socket.close(), 1000 * HIDDEN_SECONDS);
  };
  document.addEventListener("visibilitychange", onVisibilityChange);
  return new Promise((done) => {
    let messages = 0;
    socket.onmessage = ({ data }) => {
      messages += 1;
      if (data[0] === "{") onState(JSON.parse(data));
      else onLines(parseLines(data));
    };
    socket.onclose = async (event) => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", onVisibilityChange);
      if (event.code === FORBIDDEN)
        await askForKey("This page shows all requests, so it requires an administrator's key.");
      done(messages || event.code === FORBIDDEN);
    };
  });
}

// One call for all lines is much faster than one for each.
export const parseLines = (text) => JSON.parse(`[${text.trimEnd().replaceAll("\n", ",")}]`);

// Calls onState(state of the server) and onLines(lines of the event stream), and showStatus(state, words)
// while there is no connection.
export async function follow({ onState, onLines, showStatus }) {
  let retryDelay = 0.5;
  for (;;) {
    await untilVisible();
    try {
      await waitUntilAdmitted(showStatus);
      if (await watch(onState, onLines)) retryDelay = 0.5;
    } catch {
      // The server cannot be reached.
    }
    if (document.hidden) continue;
    showStatus("gone", "cannot reach the server; retrying");
    await pause(retryDelay);
    retryDelay = Math.min(retryDelay * 2, 5);
  }
}
