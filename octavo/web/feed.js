// The connection to /ws/watch. It asks for a key if the server requires one, and reconnects by itself.
// A hidden page disconnects, so that the server and the engine do no work for it.

const STORE = "octavo.key";
let key = sessionStorage.getItem(STORE) || "";

export const authorization = () => (key ? { authorization: `Bearer ${key}` } : {});

const base64url = (text) => btoa(text).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
const visible = () =>
  new Promise((done) => {
    if (!document.hidden) return done();
    document.addEventListener("visibilitychange", () => done(), { once: true });
  });

const FORBIDDEN = 4403; // The server closes the connection with this code if the key is not an administrator's.

function askForKey(why) {
  const dialog = document.getElementById("ask");
  if (why) document.getElementById("ask-why").textContent = `${why} The key stays in this tab.`;
  dialog.showModal();
  return new Promise((done) => {
    document.getElementById("ask-form").onsubmit = (event) => {
      event.preventDefault();
      key = document.getElementById("key").value.replace(/[^!-~]/g, ""); // A header can contain only these characters.
      sessionStorage.setItem(STORE, key);
      dialog.close();
      done();
    };
    dialog.oncancel = (event) => event.preventDefault();
  });
}

// A browser hides the reason why a WebSocket was refused, so an ordinary request checks the key first.
async function admitted(say) {
  for (;;) {
    const reply = await fetch("/version", { headers: authorization(), cache: "no-store" });
    if (reply.ok) return;
    if (reply.status === 401) {
      say("key", "an API key is required");
      await askForKey(key && "The server does not accept this key.");
    } else {
      say("gone", reply.status === 429 ? "too many invalid keys: waiting" : `refused: ${reply.status}`);
      await pause(Number(reply.headers.get("retry-after")) || 5);
    }
  }
}

function watch(show) {
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  const protocols = ["octavo-watch", ...(key ? [`octavo-key.${base64url(key)}`] : [])];
  const socket = new WebSocket(`${scheme}//${location.host}/ws/watch`, protocols);
  const leave = () => document.hidden && socket.close();
  document.addEventListener("visibilitychange", leave);
  return new Promise((done) => {
    let frames = 0;
    socket.onmessage = (event) => {
      frames += 1;
      show(JSON.parse(event.data));
    };
    socket.onclose = async (event) => {
      document.removeEventListener("visibilitychange", leave);
      if (event.code === FORBIDDEN) await askForKey("This page shows all requests, so it requires an administrator's key.");
      done(frames || event.code === FORBIDDEN);
    };
  });
}

// Calls show(frame) for each frame, and say(state, words) while there are no frames.
export async function follow(show, say) {
  let wait = 0.5;
  for (;;) {
    await visible();
    try {
      await admitted(say);
      if (await watch(show)) wait = 0.5;
    } catch {
      // The server cannot be reached.
    }
    if (document.hidden) continue;
    say("gone", "cannot reach the server; retrying");
    await pause(wait);
    wait = Math.min(wait * 2, 5);
  }
}
