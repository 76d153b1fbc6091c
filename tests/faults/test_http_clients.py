"""The HTTP clients that languages bring put and get: Java's, which offers h2c, Go's, Node's fetch and curl.

`make faults` runs them: what they need comes with deploy/install-generators.
"""

import os
import subprocess
import uuid

import pytest

from tests.integration.api.api_harness import api_process

pytestmark = pytest.mark.faults

LONG = bool(os.environ.get("SCHEMALESS_FAULTS_LONG"))

JAVA = """
import java.net.URI;
import java.net.http.*;
public class Client {
  public static void main(String[] arguments) throws Exception {
    HttpClient client = HttpClient.newHttpClient();
    for (int ref = 1; ref < 4; ref++) {
      URI cell = URI.create(arguments[0] + ref);
      String body = "{\\"fare\\": 12}";
      var publisher = HttpRequest.BodyPublishers.ofString(body);
      if (ref == 2)  // without a length: chunked
        publisher = HttpRequest.BodyPublishers.ofInputStream(() -> new java.io.ByteArrayInputStream(body.getBytes()));
      var put = HttpRequest.newBuilder(cell).header("content-type", "application/json").PUT(publisher).build();
      System.out.println(client.send(put, HttpResponse.BodyHandlers.ofString()).statusCode());
      var got = client.send(HttpRequest.newBuilder(cell).build(), HttpResponse.BodyHandlers.ofString());
      System.out.println(got.statusCode() + " " + got.body().contains("{\\"fare\\":12}"));
    }
  }
}
"""
GO = """
package main
import ("bytes"; "fmt"; "io"; "net/http"; "os"; "strings")
func main() {
  for ref := 1; ref < 4; ref++ {
    cell := fmt.Sprintf("%s%d", os.Args[1], ref)
    var payload io.Reader = strings.NewReader(`{"fare": 12}`)
    if ref == 2 { payload = io.MultiReader(payload) }  // without a length: chunked
    put, _ := http.NewRequest("PUT", cell, payload)
    if ref == 3 { put.Header.Set("Expect", "100-continue") }
    answer, err := http.DefaultClient.Do(put)
    if err != nil { panic(err) }
    io.Copy(io.Discard, answer.Body); answer.Body.Close()
    fmt.Println(answer.StatusCode)
    got, err := http.Get(cell)
    if err != nil { panic(err) }
    body, _ := io.ReadAll(got.Body); got.Body.Close()
    fmt.Println(got.StatusCode, bytes.Contains(body, []byte(`{"fare":12}`)))
  }
}
"""
NODE = """
const http = require("node:http");
const agent = new http.Agent({ keepAlive: true });
const viaHttp = (method, url, payload) => new Promise((resolve, reject) => {
  const request = http.request(url, { method, agent }, (answer) => {
    let text = ""; answer.on("data", (part) => (text += part)).on("end", () => resolve([answer.statusCode, text]));
  }).on("error", reject);
  if (payload) { request.write(payload.slice(0, 5)); request.write(payload.slice(5)); }  // chunked
  request.end();
});
const viaFetch = async (method, url, body) => {
  const got = await fetch(url, { method, body, headers: { "content-type": "application/json" } });
  return [got.status, await got.text()];
};
(async () => {
  for (const [ref, call] of [[1, viaFetch], [2, viaHttp], [3, viaFetch]]) {
    console.log((await call("PUT", process.argv[2] + ref, '{"fare": 12}'))[0]);
    const [status, text] = await call("GET", process.argv[2] + ref);
    console.log(status, text.includes('{"fare":12}'));
  }
  agent.destroy();
})();
"""
CURL = r"""
put() { curl -s -o /dev/null -w '%{http_code}\n' -T - "$@" <<<'{"fare": 12}'; }
get() { curl -s -f "$1" | grep -q '"fare":12' && echo 200 true; }
put --http2 "${1}1"; get "${1}1"
put -H 'Expect: 100-continue' "${1}2"; get "${1}2"
put --http1.0 -H 'Transfer-Encoding:' -H 'Content-Length: 13' "${1}3"; get "${1}3"
"""
CLIENTS = {
    "java": ("Client.java", JAVA, ["java", "Client.java"]),
    "go": ("client.go", GO, ["go", "run", "client.go"]),
    "node": ("client.cjs", NODE, ["node", "client.cjs"]),
    "curl": ("client.sh", CURL, ["bash", "client.sh"]),
}


@pytest.fixture(scope="module")
def cells_url(running, make_datastore):
    datastore = make_datastore()
    with api_process(running.path) as api:
        yield lambda: f"http://127.0.0.1:{api.port}/v1/{datastore.name}/cells/{uuid.uuid4()}/BASE/"


if LONG:

    @pytest.mark.parametrize("language", CLIENTS)
    def test_a_client_puts_and_gets(cells_url, tmp_path, language):
        """With a length, in chunks and with an expectation: each put is stored, on connections that are kept."""
        name, source, command = CLIENTS[language]
        (tmp_path / name).write_text(source)
        environment = os.environ | {"GOCACHE": str(tmp_path / "go"), "GO111MODULE": "off"}
        ran = subprocess.run(
            [*command, cells_url()],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.stdout.splitlines() == ["201", "200 true"] * 3, ran.stderr
