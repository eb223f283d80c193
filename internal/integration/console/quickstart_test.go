package console

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
)

// quickstart runs examples/quickstart -serve until the test ends, and returns its address.
func quickstart(t *testing.T) string {
	t.Helper()
	services.Chromium(t) // before it is built
	program := filepath.Join(t.TempDir(), "quickstart")
	build := exec.Command("go", "build", "-o", program, "./quickstart")
	build.Dir = "../../../examples"
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	run := exec.Command(program, "-serve", "127.0.0.1:0")
	run.Stderr = os.Stderr
	lines, err := run.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, run.Start())
	ended := make(chan error, 1)
	t.Cleanup(func() {
		_ = run.Process.Signal(os.Interrupt)
		select {
		case err := <-ended:
			require.NoError(t, err, "exit status after an interrupt")
		case <-time.After(patience):
			_ = run.Process.Kill()
			t.Error("it runs on after an interrupt")
		}
	})
	first, err := bufio.NewReader(lines).ReadString('\n')
	go func() { ended <- run.Wait() }()
	require.NoError(t, err)
	return strings.Fields(first)[0]
}

func TestQuickstartInABrowser(t *testing.T) {
	at := quickstart(t)
	p := newTab(t)
	p.size(1180, 940, false)
	p.open(at)
	p.until(`["#plain path", "#resilient path"].every((s) => document.querySelectorAll(s).length >= 6)`)
	p.shows("healthy again")
	require.Equal(t, 8, eval[int](p, `document.querySelectorAll("figure").length`))
	if *pictures != "" {
		time.Sleep(33 * time.Second) // three times the bad half minute
		p.picture("quickstart")
		p.size(1180, 940, true)
		time.Sleep(time.Second)
		p.picture("quickstart-dark")
		p.size(390, 844, false)
		time.Sleep(time.Second)
		p.picture("quickstart-phone")
		p.size(1180, 940, false)
	}
	// The console controls the client of the charts.
	p.click(`header a`)
	p.live()
	p.click(`a.card[href*="kind=breaker"]`)
	p.click(`button[value=force_open]`)
	p.shows("It refuses all calls until it is enabled.")
	p.click(`button[name=sure]`)
	p.shows("The breaker was forced open.")
	p.shows("forced open")
	p.click(`button[value=enable]`)
	p.shows("The breaker was enabled.")
}
