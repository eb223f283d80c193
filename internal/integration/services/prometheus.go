package services

import (
	"bytes"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// Promtool runs promtool in dir and returns its output. If promtool fails, the test fails.
func Promtool(t testing.TB, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command(program(t, "promtool"), args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("promtool %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// Prometheus runs a Prometheus server that belongs to one test. files contains the configuration files by name:
// prometheus.yml and the rule files that it refers to. Prometheus returns the URL of the server when the server is
// ready.
func Prometheus(t testing.TB, files map[string]string) (url string) {
	t.Helper()
	binary := program(t, "prometheus")
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	addr := FreeAddr(t)
	var log bytes.Buffer
	cmd := exec.Command(binary, "--config.file="+filepath.Join(dir, "prometheus.yml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+addr)
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("prometheus:\n%s", log.String())
		}
	})
	url = "http://" + addr
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		resp, err := http.Get(url + "/-/ready")
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return url
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("Prometheus at %s does not become ready: %v", url, err)
		}
	}
}

// program returns the path of a program that is part of Debian's package prometheus.
func program(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		missing(t, name+" (of the package prometheus)", err)
	}
	return path
}
