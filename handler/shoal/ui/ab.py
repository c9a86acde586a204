"""`ABPlayer`: several takes of one text, switched at the same position while they play. Loudness is left as it is.

An anywidget, since ipywidgets has no player that can switch. The browser's own players do the work: one per take, at
full volume, of which one is heard.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

import anywidget
import numpy as np
import soundfile
import traitlets

_JS = """
let players = 0;
function clock(seconds) { return (Number.isFinite(seconds) ? seconds : 0).toFixed(1) + " s"; }

function render({ model, el }) {
  const id = "shoal-ab-" + (++players);
  const root = document.createElement("div");
  root.className = "shoal-ab";
  root.setAttribute("role", "group");
  const title = document.createElement("div");
  title.className = "shoal-ab-title";
  title.id = id + "-title";
  root.setAttribute("aria-labelledby", title.id);
  const bar = document.createElement("div");
  bar.className = "shoal-ab-bar";
  const play = document.createElement("button");
  play.type = "button";
  play.className = "shoal-ab-play";
  const position = document.createElement("input");
  position.type = "range";
  position.min = 0; position.step = 0.01; position.value = 0;
  position.setAttribute("aria-label", "position");
  const time = document.createElement("span");
  time.className = "shoal-ab-time";
  bar.append(play, position, time);
  const takes = document.createElement("div");
  takes.className = "shoal-ab-takes";
  takes.setAttribute("role", "radiogroup");
  takes.setAttribute("aria-label", "take to listen to");
  root.append(title, takes, bar);
  el.appendChild(root);

  let audios = [], radios = [], urls = [], sent = 0, heard = 0, stale = false;
  const active = () => audios[model.get("active")];

  function tell(values, late) {
    const now = performance.now();
    if (late && now - sent < 250) return;  // the position goes to Python four times a second at most
    sent = now;
    for (const [name, value] of Object.entries(values)) model.set(name, value);
    model.save_changes();
  }
  function show() {
    const audio = active();
    const playing = Boolean(audio) && !audio.paused && !audio.ended;
    play.textContent = playing ? "❚❚ Pause" : "▶ Play";
    play.setAttribute("aria-label", playing ? "pause" : "play");
    play.disabled = !audio;
    if (!audio) { time.textContent = "nothing to hear yet"; return; }
    position.max = audio.duration || 0;
    position.value = audio.currentTime;
    const text = clock(audio.currentTime) + " of " + clock(audio.duration);
    time.textContent = text;
    position.setAttribute("aria-valuetext", text);
    radios.forEach((radio, i) => { radio.checked = i === model.get("active"); });
  }
  function build() {
    audios.forEach((audio) => audio.pause());
    urls.forEach((url) => URL.revokeObjectURL(url));
    takes.replaceChildren();
    root.querySelectorAll("audio").forEach((audio) => audio.remove());
    const labels = model.get("labels");
    urls = model.get("sounds").map((sound) => URL.createObjectURL(new Blob([sound], { type: "audio/wav" })));
    audios = urls.map((url, i) => {
      const audio = document.createElement("audio");
      audio.src = url; audio.preload = "auto"; audio.volume = 1;
      audio.setAttribute("aria-label", labels[i]);
      for (const event of ["loadedmetadata", "play", "pause", "ended", "seeked"]) audio.addEventListener(event, show);
      for (const event of ["play", "pause", "ended"]) {
        audio.addEventListener(event, () => {
          if (i === model.get("active")) tell({ playing: !audio.paused && !audio.ended, position: audio.currentTime });
        });
      }
      audio.addEventListener("timeupdate", () => {
        if (i !== model.get("active")) return;
        show();
        tell({ position: audio.currentTime }, true);
      });
      root.appendChild(audio);
      return audio;
    });
    radios = labels.map((label, i) => {
      const line = document.createElement("label");
      const radio = document.createElement("input");
      radio.type = "radio"; radio.name = id; radio.value = i;
      radio.addEventListener("change", () => tell({ active: i }));
      const key = document.createElement("kbd");
      key.textContent = i + 1;
      line.append(radio, key, document.createTextNode(" " + label));
      takes.appendChild(line);
      return radio;
    });
    title.textContent = model.get("title");
    heard = model.get("active");
    show();
  }
  function rebuild() {  // once, though several traits change together
    if (stale) return;
    stale = true;
    setTimeout(() => { stale = false; build(); }, 0);
  }
  function change() {  // another take, where the last one was
    const before = audios[heard], after = active();
    if (!after || stale) return;
    heard = model.get("active");
    if (before && before !== after) {
      const playing = !before.paused && !before.ended;
      after.currentTime = Math.min(before.currentTime, Math.max(0, (after.duration || 0) - 0.01));
      before.pause();
      if (playing) after.play();
    }
    show();
  }
  play.addEventListener("click", () => {
    const audio = active();
    if (!audio) return;
    if (audio.paused || audio.ended) audio.play(); else audio.pause();
  });
  position.addEventListener("input", () => { const audio = active(); if (audio) audio.currentTime = position.value; });
  root.addEventListener("keydown", (event) => {
    event.stopPropagation();  // the notebook has other uses for these keys
    const take = Number(event.key) - 1;
    if (take >= 0 && take < audios.length) tell({ active: take });
  });
  model.on("change:sounds", rebuild);
  model.on("change:labels", rebuild);
  model.on("change:title", rebuild);
  model.on("change:active", change);
  build();
  return () => {
    audios.forEach((audio) => audio.pause());
    urls.forEach((url) => URL.revokeObjectURL(url));
    model.off("change:sounds", rebuild);
    model.off("change:labels", rebuild);
    model.off("change:title", rebuild);
    model.off("change:active", change);
  };
}
export default { render };
"""

_CSS = """
.shoal-ab {
  color: var(--jp-ui-font-color1, #222); background: var(--jp-layout-color2, #f5f5f5);
  font-family: var(--jp-ui-font-family, sans-serif); font-size: var(--jp-ui-font-size1, 13px);
  border: 1px solid var(--jp-border-color2, #ccc); border-radius: 4px; padding: 8px 12px; margin: 4px 0;
  max-width: 680px;
}
.shoal-ab-title { font-weight: 600; margin-bottom: 4px; }
.shoal-ab-title:empty { display: none; }
.shoal-ab-takes { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-bottom: 6px; }
.shoal-ab-takes label { display: inline-flex; align-items: center; gap: 5px; cursor: pointer; }
.shoal-ab-takes input, .shoal-ab-bar input { accent-color: var(--jp-brand-color1, #1976d2); }
.shoal-ab kbd {
  border: 1px solid var(--jp-border-color1, #999); border-radius: 3px; padding: 0 4px; font-size: 11px;
  color: inherit; background: var(--jp-layout-color1, #fff);
}
.shoal-ab-bar { display: flex; align-items: center; gap: 10px; }
.shoal-ab-bar input { flex: 1; min-width: 100px; }
.shoal-ab-play {
  min-width: 84px; padding: 4px 10px; cursor: pointer; border-radius: 3px;
  color: var(--jp-ui-inverse-font-color1, #fff); background: var(--jp-brand-color1, #1976d2);
  border: 1px solid var(--jp-brand-color1, #1976d2);
}
.shoal-ab-play:disabled { opacity: 0.5; cursor: default; }
.shoal-ab :focus-visible { outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 2px; }
.shoal-ab-time { font-variant-numeric: tabular-nums; min-width: 9em; }
"""


class ABPlayer(anywidget.AnyWidget):
    """Plays one of several takes; the number keys and the radio buttons switch between them without losing the place.

    Traits for the view: `active` (which take), `playing`, `position` in seconds.
    """

    _esm, _css = _JS, _CSS
    title = traitlets.Unicode("").tag(sync=True)
    labels = traitlets.List(traitlets.Unicode()).tag(sync=True)
    sounds = traitlets.List(traitlets.Bytes()).tag(sync=True)  # WAV files
    active = traitlets.Int(0, min=0).tag(sync=True)
    playing = traitlets.Bool(False).tag(sync=True)
    position = traitlets.Float(0.0).tag(sync=True)

    def __init__(self, takes: Iterable[tuple[str, np.ndarray, int]] = (), title: str = "") -> None:
        """See `set_takes`."""
        super().__init__()
        self.set_takes(takes, title)

    def set_takes(self, takes: Iterable[tuple[str, np.ndarray, int]], title: str | None = None) -> None:
        """Other sound: (label, audio (samples,) float32 in -1 to 1, sample rate) for each take.

        What lies beyond -1 and 1 is cut off, as any sound card does; nothing else changes.
        """
        takes = list(takes)
        with self.hold_sync(), self.hold_trait_notifications():
            self.active, self.playing, self.position = 0, False, 0.0
            self.labels = [label for label, _, _ in takes]
            self.sounds = [wav_bytes(audio, rate) for _, audio, rate in takes]
            if title is not None:
                self.title = title


def wav_bytes(audio: np.ndarray, rate: int) -> bytes:
    """A 16-bit WAV file of (samples,) float32, at the loudness that it has."""
    buffer = io.BytesIO()
    soundfile.write(buffer, np.clip(audio, -1.0, 1.0), rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()
