// Package console tests the console in a real browser.
package console

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"iter"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/registry"
)

// pictures is the directory for the pictures of the documentation.
var pictures = flag.String("pictures", "", "directory for pictures; empty takes none")

// patience is the maximum wait for an event. A test that passes never waits that long.
const patience = 30 * time.Second

var (
	browser  context.Context // nil until a test needs it
	starting sync.Mutex
	quit     []func()
)

func TestMain(m *testing.M) {
	code := m.Run()
	for _, f := range quit {
		f()
	}
	os.Exit(code)
}

// A tab is a browser tab that is closed after the test. All tests share a browser.
type tab struct {
	t          *testing.T
	ctx        context.Context
	complaints *complaints
}

// complaints has the exceptions of the page's script and the violations of its Content-Security-Policy.
type complaints struct {
	mu      sync.Mutex
	all     []string
	allowed bool
}

func (c *complaints) listen(messages iter.Seq2[chromedp.ConsoleMessage, error]) {
	for m, err := range messages {
		if err != nil {
			return
		}
		if m.IsException() || m.Source == "security" || m.Type == "error" && m.Source != "network" {
			c.mu.Lock()
			c.all = append(c.all, m.String())
			c.mu.Unlock()
		}
	}
}

func newTab(t *testing.T) tab {
	t.Helper()
	path := services.Chromium(t)
	starting.Lock()
	defer starting.Unlock()
	if browser == nil {
		all, stop := chromedp.NewExecAllocator(context.Background(), chromedp.ExecPath(path), chromedp.Headless,
			chromedp.NoSandbox,
			chromedp.Flag("force-color-profile", "srgb"), chromedp.WSURLReadTimeout(patience))
		first, end := chromedp.NewContext(all)
		require.NoError(t, chromedp.Do(first))
		browser, quit = first, append(quit, end, stop)
	}
	ctx, end := chromedp.NewContext(browser)
	t.Cleanup(end)
	p := tab{t, ctx, &complaints{}}
	require.NoError(t, chromedp.Do(ctx)) // a timeout here would apply to the tab
	go p.complaints.listen(chromedp.Console(ctx))
	t.Cleanup(func() {
		p.complaints.mu.Lock()
		defer p.complaints.mu.Unlock()
		require.True(t, p.complaints.allowed || len(p.complaints.all) == 0, "the browser complains: %q", p.complaints.all)
	})
	p.size(1280, 860, false)
	return p
}

// do runs an action with the timeout patience.
func (p tab) do(what string, a chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	if err := chromedp.Do(ctx, a); err != nil {
		p.t.Fatalf("%s: %v\n%s", what, err, p.content())
	}
}

func (p tab) open(url string) { p.t.Helper(); p.do("open "+url, chromedp.Navigate(url)) }

// click clicks the first element that a CSS selector or an XPath matches.
func (p tab) click(sel string) {
	p.t.Helper()
	p.until(`document.readyState === "complete"`) // loading may replace the element
	p.do("click "+sel, chromedp.Click(sel))
}

// fill types a text into a field.
func (p tab) fill(sel, text string) {
	p.t.Helper()
	p.until(fmt.Sprintf(`(() => {
		const e = document.querySelector(%q);
		if (!e) return false;
		e.focus(); e.value = "";
		return true
	})()`, sel))
	p.do("fill "+sel, chromedp.KeyEvent(text))
}

// eval returns the value of a JavaScript expression.
func eval[T any](p tab, expression string) T {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	require.NoError(p.t, err, expression)
	return v
}

func (p tab) content() string {
	text, _ := chromedp.Run(p.ctx, chromedp.Evaluate[string](`location.href + "\n" + document.body.innerText`))
	return text
}

// until waits until a JavaScript expression is true in the page.
func (p tab) until(expression string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	for {
		is, err := chromedp.Run(ctx, chromedp.Evaluate[bool](expression))
		if err == nil && is {
			return
		}
		if ctx.Err() != nil {
			p.t.Fatalf("%s is not true: %v\n%s", expression, err, p.content())
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// shows waits until the page shows a text.
func (p tab) shows(text string) {
	p.t.Helper()
	p.until(fmt.Sprintf("!!document.body && document.body.innerText.includes(%q)", text))
}

// live waits until the page is live.
func (p tab) live() {
	p.t.Helper()
	p.until(`document.getElementById("live")?.className === "live on"`)
}

// picture takes a screenshot if the flag pictures is set.
func (p tab) picture(name string) {
	p.t.Helper()
	if *pictures == "" {
		return
	}
	shot, err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot())
	require.NoError(p.t, err)
	full, err := png.Decode(bytes.NewReader(shot))
	require.NoError(p.t, err)
	require.NoError(p.t, os.MkdirAll(*pictures, 0o755))
	f, err := os.Create(filepath.Join(*pictures, name+".png"))
	require.NoError(p.t, err)
	defer f.Close()
	encoder := png.Encoder{CompressionLevel: png.BestCompression}
	require.NoError(p.t, encoder.Encode(f, fewColors(full)))
}

// fewColors reduces a picture to its 256 most frequent colors, to make the file small.
func fewColors(full image.Image) *image.Paletted {
	frequent := map[color.RGBA]int{}
	bounds := full.Bounds()
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(full.At(x, y)).(color.RGBA) }
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			frequent[at(x, y)]++
		}
	}
	colors := slices.SortedFunc(maps.Keys(frequent), func(a, b color.RGBA) int { return frequent[b] - frequent[a] })
	var palette color.Palette
	for _, c := range colors[:min(len(colors), 256)] {
		palette = append(palette, c)
	}
	few := image.NewPaletted(bounds, palette)
	nearest := map[color.RGBA]uint8{}
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			c := at(x, y)
			i, known := nearest[c]
			if !known {
				i = uint8(palette.Index(c))
				nearest[c] = i
			}
			few.SetColorIndex(x, y, i)
		}
	}
	return few
}

// size sets the size and the color scheme of the window.
func (p tab) size(width, height int64, dark bool) {
	p.t.Helper()
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	_, err := chromedp.Call(p.ctx, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{
		Width: width, Height: height, DeviceScaleFactor: 1, Mobile: width < 600})
	require.NoError(p.t, err)
	_, err = chromedp.Call(p.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
	require.NoError(p.t, err)
}

const prefix = "/debug/resilience"

// serve serves the console of reg and returns the URL of its first page.
func serve(t *testing.T, reg *registry.Registry, cfg console.Config) string {
	t.Helper()
	page := console.New(reg, cfg)
	mux := http.NewServeMux()
	mux.Handle(prefix+"/", http.StripPrefix(prefix, page))
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		page.Close()
		server.Close()
	})
	return server.URL + prefix + "/"
}

func allow(*http.Request, console.Operation) error { return nil }

var errDown = errors.New("dial tcp 10.0.3.7:443: connect: connection refused")
