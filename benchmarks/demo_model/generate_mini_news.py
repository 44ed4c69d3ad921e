"""Write mini_news: short English headlines on four topics, drawn from hand-written grammars.

Run ``python benchmarks/demo_model/generate_mini_news.py`` to rewrite ``iclperm/demo/data/mini_news``; the same seed
gives the same bytes. A headline is a template whose slots are filled at random. Most templates belong to one topic;
about one headline in eight comes from a template that two topics share, and carries the topic that the generator
happened to draw, so that no reader can be right about all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path

LABELS = ("World", "Sports", "Business", "Technology")
SPLIT_SIZES = {"train": 3000, "dev": 1000, "test": 1000}
AMBIGUOUS_SHARE = 0.13
DEFAULT_SEED = 20250327
DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "iclperm" / "demo" / "data" / "mini_news"

# fmt: off
SLOTS: dict[str, tuple[str, ...]] = {
    "country": (
        "Brazil", "Canada", "Chile", "Egypt", "Finland", "France", "Ghana", "Greece", "India", "Indonesia", "Italy",
        "Japan", "Kenya", "Mexico", "Morocco", "Norway", "Peru", "Poland", "Portugal", "Spain", "Sweden", "Thailand",
        "Turkey", "Vietnam",
    ),
    "city": (
        "Athens", "Berlin", "Bogota", "Cairo", "Dublin", "Geneva", "Jakarta", "Lagos", "Lima", "Lisbon", "London",
        "Madrid", "Manila", "Nairobi", "Oslo", "Paris", "Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Vienna",
        "Warsaw",
    ),
    "number": ("three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "twenty"),
    "weekday": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "percent": ("three percent", "four percent", "six percent", "eight percent", "nine percent", "twelve percent"),
    "money": ("two billion dollars", "half a billion", "ninety million", "forty million", "six billion euros"),
    "surname": (
        "Adeyemi", "Becker", "Costa", "Duarte", "Eriksen", "Fischer", "Garcia", "Haddad", "Ivanova", "Jensen",
        "Kimura", "Larsen", "Mendes", "Novak", "Okafor", "Petrov", "Quinn", "Rossi", "Silva", "Tanaka", "Umarov",
        "Varga", "Weber", "Yilmaz",
    ),
    # World
    "leader": (
        "president", "prime minister", "foreign minister", "interior minister", "king", "chancellor",
        "opposition leader", "ambassador",
    ),
    "parliament": ("parliament", "senate", "cabinet", "constitutional court", "coalition government", "lower house"),
    "law": (
        "asylum law", "election reform", "border bill", "emergency decree", "amnesty bill", "constitutional change",
        "citizenship law", "press freedom bill",
    ),
    "disaster": (
        "earthquake", "flood", "wildfire", "landslide", "cyclone", "drought", "volcanic eruption", "famine", "heatwave",
    ),
    "region": (
        "northern province", "coastal region", "border town", "island province", "mountain villages",
        "southern delta", "capital", "eastern valley",
    ),
    "armed": ("rebels", "militia", "separatists", "government troops", "insurgents", "peacekeepers", "border guards"),
    "agency": ("United Nations", "Red Cross", "aid agencies", "human rights envoys", "relief workers", "African Union"),
    "crowd": ("refugees", "protesters", "villagers", "migrants", "civilians", "displaced families", "demonstrators"),
    "pact": ("ceasefire", "peace accord", "border treaty", "prisoner swap", "arms truce", "nuclear treaty"),
    "crisis": ("civil war", "hostage crisis", "coup attempt", "border clash", "refugee crisis", "political deadlock"),
    # Sports
    "club": (
        "Rovers", "United", "Harbour City", "Wanderers", "Athletic", "Rangers", "Dynamos", "Falcons", "Bulls",
        "Lakeside", "Tigers", "Northern Stars", "Mariners", "Comets",
    ),
    "athlete": (
        "striker", "goalkeeper", "sprinter", "midfielder", "swimmer", "quarterback", "defender", "batsman", "cyclist",
        "point guard", "boxer", "gymnast", "tennis champion",
    ),
    "contest": (
        "cup final", "semi-final", "league match", "marathon", "grand slam", "championship", "derby", "relay",
        "play-off", "title race", "qualifier", "quarter-final",
    ),
    "injury": ("knee injury", "hamstring strain", "ankle sprain", "shoulder surgery", "groin strain", "concussion"),
    "score": ("two goals", "a late penalty", "a hat-trick", "an early header", "a stoppage-time winner", "a free kick"),
    "medal": ("gold medal", "silver medal", "bronze medal", "world title", "Olympic crown", "league trophy"),
    "coach": ("coach", "manager", "head coach", "captain", "assistant coach"),
    "discipline": (
        "rugby", "cricket", "hockey", "basketball", "volleyball", "rowing", "football", "tennis", "athletics",
        "swimming", "handball",
    ),
    "beat": ("beat", "edge", "crush", "stun", "hold off", "outplay", "thrash"),
    # Business
    "firm": (
        "retailer", "carmaker", "airline", "brewer", "supermarket chain", "insurer", "oil major", "drugmaker",
        "furniture maker", "steelmaker", "shipping group", "hotel group", "lender", "food giant",
    ),
    "gain": ("jumps", "rises", "climbs", "surges", "rallies", "edges up"),
    "fall": ("slumps", "falls", "drops", "slides", "tumbles", "shrinks"),
    "figure": (
        "quarterly profit", "annual revenue", "operating margin", "net income", "full-year earnings", "pre-tax profit",
        "dividend payout", "order book",
    ),
    "asset": (
        "crude oil", "gold", "copper", "wheat", "natural gas", "cocoa", "silver", "platinum", "the dollar", "the euro",
    ),
    "lever": ("inflation", "unemployment", "consumer spending", "factory output", "wage growth", "export demand"),
    "deal": ("merger", "takeover bid", "buyout", "joint venture", "stock listing", "rights issue", "share buyback"),
    "executive": ("chief executive", "finance chief", "chairman", "treasurer", "sales director"),
    "executives": ("shareholders", "investors", "creditors", "directors", "founders"),
    "finance": ("central bank", "hedge fund", "pension fund", "stock exchange", "private equity firm", "bond market"),
    # Technology
    "techfirm": (
        "startup", "software maker", "chip designer", "phone maker", "search engine", "cloud provider",
        "robotics lab", "browser maker", "satellite operator", "game studio",
    ),
    "gadget": (
        "smartphone", "laptop", "headset", "smartwatch", "tablet", "camera drone", "home robot", "processor",
        "foldable screen", "wireless charger", "quantum chip",
    ),
    "software": (
        "operating system", "messaging app", "web browser", "voice assistant", "search tool", "photo app",
        "translation app", "password manager", "open source library", "video platform",
    ),
    "science": (
        "machine learning", "quantum computing", "speech recognition", "computer vision", "solid-state storage",
        "augmented reality", "encryption", "robotics", "neural network", "cloud computing",
    ),
    "techie": ("engineers", "researchers", "developers", "programmers", "security experts", "computer scientists"),
    "flaw": ("security flaw", "data leak", "login bug", "malware", "server outage", "phishing attack", "software bug"),
    "spec": (
        "longer battery life", "faster graphics", "a sharper display", "offline mode", "stronger encryption",
        "voice control", "more memory", "satellite messaging",
    ),
    # Shared between two topics
    "goods": ("steel", "car parts", "grain", "timber", "solar panels", "textiles", "fertiliser", "wine"),
    "app": ("messaging app", "video platform", "search engine", "drone", "phone network", "satellite network"),
    "move": ("jump", "slide", "rally", "slip", "climb", "tumble"),
    "chip": ("chip", "smartphone", "software", "cloud", "battery", "robotics"),
    "sporttech": ("goal-line cameras", "wearable sensors", "video replay software", "tracking chips", "smart balls"),
    "investor": ("billionaire", "investment fund", "media group", "airline owner", "consortium", "bank"),
}
# fmt: on

TEMPLATES: dict[str, tuple[str, ...]] = {
    "World": (
        "{country} {parliament} approves {law} after night of debate",
        "{country} {leader} resigns over {crisis}",
        "{disaster} kills dozens in {country} {region}",
        "{agency} warn of hunger after {disaster} in {country}",
        "{crowd} flee {region} as {armed} advance on {city}",
        "{country} and {country2} sign {pact} in {city}",
        "talks on {pact} collapse as {armed} shell {region}",
        "{armed} free {number} hostages in {country} {region}",
        "{leader} of {country} visits {city} to discuss {pact}",
        "{crowd} march in {city} against {law}",
        "{country} declares state of emergency after {disaster}",
        "rescue teams search {region} of {country} after {disaster}",
        "{country} recalls ambassador in dispute with {country2}",
        "{country} votes on {weekday} in first election since {crisis}",
        "{agency} to send {number} convoys to {country} {region}",
        "{leader} {surname} wins second term in {country} election",
        "{country} {parliament} rejects {law} by narrow vote",
        "{armed} and {armed2} agree {pact} in {country}",
        "thousands of {crowd} stranded at {country} border",
        "{country} exiles return home as {crisis} ends",
        "envoy {surname} arrives in {city} to end {crisis}",
        "court in {city} jails former {leader} for role in {crisis}",
        "{country} opens border to {crowd} from {country2}",
        "{agency} count {number} villages destroyed by {disaster}",
        "{country} {leader} escapes attack near {region}",
        "curfew in {city} after {crowd} clash with police",
        "{country} expels {number} diplomats over {crisis}",
        "bomb kills {number} {crowd} at market in {country}",
    ),
    "Sports": (
        "{club} {beat} {club2} to reach {contest}",
        "{athlete} {surname} out for {number} weeks with {injury}",
        "{surname} scores {score} as {club} {beat} {club2}",
        "{country} win {medal} in {discipline} at {city} games",
        "{club} sack {coach} after {number} defeats",
        "{athlete} {surname} signs {number} year contract with {club}",
        "{coach} {surname} praises young {athlete} after {contest}",
        "{country} {discipline} team name {surname} as {coach}",
        "{surname} breaks record to take {medal} in {city}",
        "{club} fans celebrate {contest} victory in {city}",
        "{athlete} misses {contest} because of {injury}",
        "{country} {beat} {country2} in {discipline} {contest}",
        "{surname} storms into {contest} with straight-set win",
        "late drama as {club} and {club2} draw {contest}",
        "{club} unbeaten in {number} games before {contest}",
        "referee under fire after {club} lose {contest}",
        "{athlete} {surname} retires after {medal} in {discipline}",
        "{club} {coach} furious over red card in {contest}",
        "rain delays {discipline} {contest} between {country} and {country2}",
        "{surname} hits {score} on debut for {club}",
        "{country} squad for {discipline} {contest} without injured {surname}",
        "{athlete} {surname} banned {number} matches for foul",
        "{club} climb to top of table after {score}",
        "veteran {athlete} returns from {injury} for {contest}",
        "{surname} and {surname2} set for {contest} showdown",
        "{club} goalkeeper saves penalty in dramatic {contest}",
        "{country} sprinters dominate heats before {city} {contest}",
        "{coach} {surname} rests {athlete} for {weekday} {contest}",
    ),
    "Business": (
        "{firm} {figure} {gain} {percent} on strong demand",
        "{firm} {figure} {fall} {percent} as costs rise",
        "{country} central bank raises {lever} forecast again",
        "{firm} to cut {number} thousand jobs after {deal}",
        "{executives} back {deal} between {firm} and {firm2}",
        "{asset} {gain} as traders await {lever} data",
        "{asset} {fall} to lowest level in {number} months",
        "{firm} in talks over {deal} worth {money}",
        "{finance} buys stake in {country} {firm} for {money}",
        "{executive} {surname} leaves {firm} after weak {figure}",
        "{country} {lever} {gain} faster than economists forecast",
        "{firm} files for bankruptcy with debts of {money}",
        "{firm} shares {move} after {figure} warning",
        "{finance} sees {lever} easing later this year",
        "{firm} to close {number} factories as sales slow",
        "{executives} reject {deal} as {figure} {fall}",
        "{city} stocks {move} on {lever} fears",
        "{firm} raises {money} in {city} {deal}",
        "{finance} holds {lever} outlook as economy cools",
        "{country} economy grows {percent} on retail sales",
        "{firm} doubles dividend as {figure} {gain}",
        "{asset} steady before {finance} meeting on {weekday}",
        "{firm} warns {executives} of lower {figure}",
        "small {firm} lists shares on {city} stock exchange",
        "{lever} worries push {asset} lower in {city} trading",
        "{firm} wins {money} loan from {finance}",
        "regulator fines {firm} {money} over {deal}",
        "{executives} of {firm} sell shares before {figure} report",
    ),
    "Technology": (
        "{techfirm} unveils {gadget} with {spec}",
        "{techie} find {flaw} in popular {software}",
        "{software} update brings {spec} to {gadget} users",
        "{techie} use {science} to speed up {software}",
        "{flaw} hits {software} used by millions",
        "{techfirm} delays {gadget} because of {flaw}",
        "new {gadget} promises {spec} and {science}",
        "{techie} in {city} train {science} model on {gadget}",
        "{techfirm} releases {software} as free download",
        "{science} breakthrough lets {gadget} run {software}",
        "review: {gadget} offers {spec} but lacks {software}",
        "{techfirm} patches {flaw} in {software}",
        "hackers exploit {flaw} to attack {techfirm}",
        "{techfirm} tests {science} in new {gadget}",
        "{software} adds {spec} in beta version",
        "{techie} build {gadget} that learns with {science}",
        "{techie} warn of {flaw} in {gadget}",
        "{city} university opens {science} laboratory for {techie}",
        "{techfirm} shows prototype {gadget} at {city} conference",
        "{software} now supports {science} on older {gadget}",
        "{surname} wins prize for {science} research",
        "{techfirm} ends support for {number} year old {software}",
        "{gadget} with {spec} goes on sale {weekday}",
        "{techie} teach {gadget} to recognise faces with {science}",
        "{techfirm} opens source code of its {software}",
        "how {science} will change your {gadget}",
        "{software} users locked out after {flaw}",
        "{country} {techie} launch {gadget} powered by {science}",
    ),
}

AMBIGUOUS_TEMPLATES: dict[tuple[str, str], tuple[str, ...]] = {
    ("Business", "Technology"): (
        "{chip} maker shares {move} after {gadget} launch in {city}",
        "{techfirm} and {firm} plan {deal} for {money}",
        "{techfirm} {figure} {gain} on {gadget} sales",
        "{finance} invests {money} in {science} {techfirm}",
        "{chip} group cuts {number} hundred jobs to focus on {science}",
    ),
    ("Sports", "Business"): (
        "{club} sold to {investor} from {country} for {money}",
        "{investor} buys {club} stadium in {city} for {money}",
        "{club} shares {move} after {contest}",
        "{club} report {figure} of {money} after {contest}",
        "{firm} ends {money} sponsorship of {discipline} {contest}",
    ),
    ("World", "Business"): (
        "{country} raises tariffs on {goods} from {country2}",
        "{country} and {country2} reach trade deal on {goods}",
        "{leader} of {country} promises {money} for {goods} industry",
        "{disaster} in {country} sends price of {goods} higher",
        "{country} {parliament} votes on {lever} rescue plan",
    ),
    ("World", "Technology"): (
        "{country} bans {app} over data fears",
        "{country} {leader} blames {country2} for {flaw}",
        "{country} {parliament} debates law on {science}",
        "{armed} use {gadget} and {app} in {country} {region}",
        "{agency} test {science} to predict {disaster} in {country}",
    ),
    ("World", "Sports"): (
        "{country} bid to host {discipline} games divides {parliament}",
        "{country} to boycott {discipline} {contest} in {city}",
        "{leader} of {country} meets {discipline} team in {city}",
        "{crowd} disrupt {discipline} {contest} in {city}",
        "{country} {athlete} seeks asylum in {city}",
    ),
    ("Sports", "Technology"): (
        "{discipline} league to try {sporttech} in {contest}",
        "{techie} help {athlete} train with {science}",
        "{club} fit players with {sporttech} before {contest}",
        "{science} picks {club} as favourites for {contest}",
        "{app} to stream {discipline} {contest} from {city}",
    ),
}


def fill(template: str, rng: random.Random) -> str:
    """Fill every slot of a template; a slot ending in 2 draws a word that differs from its first draw."""
    words: dict[str, str] = {}
    for _, slot, _, _ in string.Formatter().parse(template):
        if slot is not None:
            choices = [word for word in SLOTS[slot.removesuffix("2")] if word not in words.values()]
            words[slot] = rng.choice(choices)
    headline = template.format(**words)
    return headline[0].upper() + headline[1:]


def draw_headline(label: str, rng: random.Random) -> str:
    """Draw one headline of a topic, from its own templates or from those it shares with another topic."""
    if rng.random() >= AMBIGUOUS_SHARE:
        return fill(rng.choice(TEMPLATES[label]), rng)
    shared = [template for pair, group in AMBIGUOUS_TEMPLATES.items() if label in pair for template in group]
    return fill(rng.choice(shared), rng)


def normalise(text: str) -> str:
    """Lower case with collapsed whitespace: two headlines that agree here are the same item."""
    return " ".join(text.lower().split())


def generate(seed: int = DEFAULT_SEED) -> dict[str, list[dict[str, str]]]:
    """Draw all splits, class-balanced, with no headline twice; the result depends on the seed alone."""
    rng = random.Random(seed)
    seen: set[str] = set()
    splits: dict[str, list[dict[str, str]]] = {}
    for split, size in SPLIT_SIZES.items():
        items: list[dict[str, str]] = []
        while len(items) < size:
            label = LABELS[len(items) % len(LABELS)]
            text = draw_headline(label, rng)
            if normalise(text) not in seen:
                seen.add(normalise(text))
                items.append({"text": text, "label": label})
        rng.shuffle(items)
        splits[split] = items
    return splits


def write_splits(folder: Path, seed: int = DEFAULT_SEED) -> None:
    """Write one JSON-lines file a split into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, items in generate(seed).items():
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, help="folder of the three files")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    arguments = parser.parse_args()
    write_splits(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
