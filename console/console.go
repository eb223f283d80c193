package console

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-resilience/resilience/registry"
)

// Config configures a [Console]. The zero Config shows metrics, states and settings, hides everything that may
// be secret, and is read-only.
type Config struct {
	// Name is the name of the program on the page. Empty means the name of its file.
	Name string
	// Show says what is shown of the things that may hold secrets. Zero means none of them.
	Show Show
	// Allow is called before each operation, and of one on many sagas before each of them,
	// with the request, whose body has been read. If it returns an error, the operation is not
	// done, and the answer is 403 with the text of the error. Nil means read-only: the page has
	// no buttons.
	//
	// Requests of other origins are rejected before Allow is called. Allow must still find
	// out whether the sender may act, unless a handler around the Console does.
	Allow func(*http.Request, Operation) error
	// Audit, if not nil, is called with the result of each operation, which may be the error
	// of Allow. ctx has the values of that of the request. Of an operation on many sagas it is
	// called for each of them.
	Audit func(context.Context, Operation, error)
}

// Show says what a [Console] shows of the things that may hold secrets. Each is hidden if
// its field is false.
type Show struct {
	Errors bool // texts of errors, which may contain keys; the notes in a saga's log
	Keys   bool // keys of a Group
	State  bool // states of sagas
}

// A Console is an http.Handler that shows the policies of a registry. New makes one. It is
// safe for concurrent use.
type Console struct {
	reg     *registry.Registry
	cfg     Config
	process process
	sampler sampler
	origin  *http.CrossOriginProtection
}

// started is when the program began, or nearly so.
var started = time.Now()

// A process is the process that a Console speaks for.
type process struct {
	Name  string    `json:"name"`
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Start time.Time `json:"start"`
}

// New returns a Console of the policies of reg, including those added later. It samples their metrics until
// Close.
func New(reg *registry.Registry, cfg Config) *Console {
	host, _ := os.Hostname()
	c := &Console{reg: reg, cfg: cfg, origin: http.NewCrossOriginProtection(), process: process{
		Name: cmp.Or(cfg.Name, filepath.Base(os.Args[0])), Host: cmp.Or(host, "unknown host"),
		PID: os.Getpid(), Start: started.Round(time.Second),
	}}
	c.sampler.begin(reg)
	return c
}

// Close stops sampling, and an action on many sagas before its next saga. It waits until the current sample is
// complete. A closed console responds with status 503.
func (c *Console) Close() {
	c.sampler.stop()
	c.sampler.ended.Wait()
}

var errClosed = errors.New("the console is closed")

//go:embed assets
var assets embed.FS

// ServeHTTP answers a request. It takes r.URL.Path as relative to where the console is: use
// http.StripPrefix.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	secure(w.Header())
	switch {
	case c.sampler.ctx.Err() != nil:
		c.fail(w, r, http.StatusServiceUnavailable, errClosed)
		return
	case r.URL.Path == "/act":
		c.act(w, r)
		return
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		w.Header().Set("Allow", "GET, HEAD")
		c.fail(w, r, http.StatusMethodNotAllowed, errors.New("this page answers GET and HEAD only"))
		return
	}
	switch r.URL.Path {
	case "":
		// The page's links are relative to a folder.
		at, _, _ := strings.Cut(r.RequestURI, "?")
		w.Header().Set("Location", path.Base(at)+"/")
		w.WriteHeader(http.StatusMovedPermanently)
	case "/":
		c.overview(w, r)
	case "/policy":
		c.policy(w, r)
	case "/sagas":
		c.sagas(w, r, http.StatusOK, r.URL.Query(), nil)
	case "/saga":
		c.saga(w, r, http.StatusOK, r.URL.Query(), nil)
	case "/console.css", "/console.js", "/icon.svg":
		w.Header().Set("Cache-Control", "no-cache")
		http.ServeFileFS(w, r, assets, "assets"+r.URL.Path)
	default:
		c.fail(w, r, http.StatusNotFound, errors.New("there is no such page"))
	}
}

// secure sets headers that allow the page nothing but its own script, style and requests,
// and that keep other sites from embedding it.
func secure(h http.Header) {
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "+
		"connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
	h.Set("X-Frame-Options", "DENY")
	h.Set("X-Content-Type-Options", "nosniff")
	// No page of another site is told where its visitor comes from. With no-referrer, the
	// forms of the page itself would have the origin null over plain HTTP.
	h.Set("Referrer-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}
