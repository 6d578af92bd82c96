const DEEPEST = 4;
const byId = (id) => document.getElementById(id);

function make(kind, options, ...children) {
  const { text, ...rest } = options || {};
  const node = document.createElement(kind);
  for (const [name, value] of Object.entries(rest)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

function resolved(schema, all) {
  const name = schema && schema.$ref ? schema.$ref.split("/").pop() : "";
  return name ? { name, ...(all[name] || {}) } : schema || {};
}

function typeOf(given, all) {
  const schema = resolved(given, all);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const options = schema.anyOf || schema.oneOf;
  if (options) return [...new Set(options.map((one) => typeOf(one, all)))].join(" or ");
  if (schema.type === "array") return "list of " + (schema.items ? typeOf(schema.items, all) : "anything");
  if (schema.name) return schema.name;
  if (Array.isArray(schema.type)) return schema.type.join(" or ");
  return schema.type || "anything";
}

function limitsOf(given, all) {
  const parts = [];
  const schema = resolved(given, all);
  for (const one of [schema, ...(schema.anyOf || []).map((option) => resolved(option, all))]) {
    if (one.minimum !== undefined) parts.push("at least " + one.minimum);
    if (one.exclusiveMinimum !== undefined) parts.push("more than " + one.exclusiveMinimum);
    if (one.maximum !== undefined) parts.push("at most " + one.maximum);
    if (one.exclusiveMaximum !== undefined) parts.push("less than " + one.exclusiveMaximum);
    if (one.minItems) parts.push(one.minItems + " items or more");
    if (one.maxLength) parts.push(one.maxLength + " characters or fewer");
  }
  if (schema.default !== undefined && schema.default !== null) parts.push("default " + JSON.stringify(schema.default));
  if (schema.description) parts.push(schema.description);
  return [...new Set(parts)].join("; ");
}

/** Schemas with fields of their own that a field may hold. */
function nested(given, all) {
  const schema = resolved(given, all);
  const found = [...(schema.anyOf || []), ...(schema.oneOf || []), ...(schema.items ? [schema.items] : [])];
  return [...(schema.properties ? [schema] : []), ...found.flatMap((one) => nested(one, all))];
}

function fieldsOf(schema, all, depth) {
  const table = make("table", {}, make("tr", {}, ...["field", "type", ""].map((text) => make("th", { text }))));
  const box = make("div", {}, table);
  const required = new Set(schema.required || []);
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const kind = typeOf(field, all) + (required.has(name) ? "" : ", optional");
    table.append(make("tr", {}, make("td", {}, make("code", { text: name })), make("td", { text: kind }),
      make("td", { class: "soft", text: limitsOf(field, all) })));
    if (depth >= DEEPEST) continue;
    for (const inner of nested(field, all)) {
      box.append(make("details", {}, make("summary", { text: name + (inner.name ? ": " + inner.name : "") }),
        fieldsOf(inner, all, depth + 1)));
    }
  }
  return box;
}

function quoted(text) {
  return "'" + text.replaceAll("'", "'\\''") + "'";
}

function curlOf(method, url, body) {
  const parts = ["curl " + quoted(url)];
  if (method !== "get") parts.push("-X " + method.toUpperCase());
  if (byId("key").value) parts.push('-H "Authorization: Bearer $KEY"');
  if (body) parts.push("-H 'Content-Type: application/json'", "-d " + quoted(body));
  return parts.join(" \\\n  ");
}

async function send(method, url, body, output) {
  output.className = "";
  output.textContent = "...";
  const headers = {};
  if (byId("key").value) headers.authorization = "Bearer " + byId("key").value;
  if (body) headers["content-type"] = "application/json";
  try {
    const reply = await fetch(url, { method: method.toUpperCase(), headers, body: body || undefined });
    let text = await reply.text();
    try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON: as it came */ }
    output.className = reply.ok ? "" : "bad";
    output.textContent = reply.status + "\n" + text;
  } catch (error) {
    output.className = "bad";
    output.textContent = String(error);
  }
}

function trial(path, method, operation) {
  const box = make("details", {}, make("summary", { text: "try it" }));
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  const inputs = (operation.parameters || []).map((parameter) => {
    const input = make("input", { "aria-label": parameter.name, placeholder: parameter.name, size: "16" });
    input.value = parameter.example ?? parameter.schema.default ?? "";
    return { parameter, input };
  });
  const area = content ? make("textarea", { "aria-label": "body", spellcheck: "false" }) : null;
  if (area) area.value = JSON.stringify(content.example ?? {}, null, 2);
  const curl = make("pre"), output = make("pre", { hidden: "" });
  const url = () => {
    let at = path.slice(1);
    const query = new URLSearchParams();
    for (const { parameter, input } of inputs) {
      if (parameter.in === "path") at = at.replace("{" + parameter.name + "}", encodeURIComponent(input.value));
      else if (input.value) query.set(parameter.name, input.value);
    }
    return new URL(at + (query.size ? "?" + query : ""), document.baseURI).href;
  };
  const write = () => { curl.textContent = curlOf(method, url(), area ? area.value : ""); };
  const button = make("button", { class: "main", type: "button", text: "Send" });
  button.addEventListener("click", () => {
    output.hidden = false;
    send(method, url(), area ? area.value : "", output);
  });
  const copy = make("button", { type: "button", text: "Copy the curl line" });
  copy.addEventListener("click", () => navigator.clipboard && navigator.clipboard.writeText(curl.textContent));
  for (const node of [area, ...inputs.map(({ input }) => input)]) if (node) node.addEventListener("input", write);
  box.addEventListener("toggle", write);
  byId("key").addEventListener("input", write);
  if (inputs.length) box.append(make("div", { class: "row" }, ...inputs.map(({ input }) => input)));
  if (area) box.append(area);
  box.append(make("div", { class: "row" }, button, copy), curl, output);
  write();
  return box;
}

function route(path, method, operation, all) {
  const id = method + path.replace(/[^a-z0-9]+/gi, "-");
  byId("list").append(make("a", { href: "#" + id },
    make("span", { class: "method " + method, text: method.toUpperCase() }),
    make("span", { text: path })));
  const article = make("article", { id }, make("div", { class: "title" },
    make("span", { class: "method " + method, text: method.toUpperCase() }), make("h2", { text: path }),
    make("span", {
      class: "soft", text: (operation.security || []).length ? "needs a key if the server has one" : "open",
    })),
    make("div", { text: operation.summary || "" }));
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  if (content) {
    const fields = fieldsOf(resolved(content.schema, all), all, 0);
    article.append(make("details", {}, make("summary", { text: "fields" }), fields));
  }
  article.append(trial(path, method, operation));
  byId("routes").append(article);
}

async function start() {
  const headers = byId("key").value ? { authorization: "Bearer " + byId("key").value } : {};
  const state = byId("state");
  try {
    const reply = await fetch("openapi.json", { headers });
    const found = await reply.json();
    if (!reply.ok) throw new Error(found.error ? found.error.message : "status " + reply.status);
    byId("list").replaceChildren();
    byId("routes").replaceChildren(state);
    state.hidden = true;
    byId("version").textContent = found.info.version;
    for (const [path, methods] of Object.entries(found.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        route(path, method, operation, found.components.schemas);
      }
    }
  } catch (error) {
    state.hidden = false;
    state.className = "bad";
    state.textContent = error.message;
  }
}

byId("key").addEventListener("change", start);
start();
