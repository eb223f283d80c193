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

// Config configures a [Console]. A Console with the zero Config shows metrics, states and settings, hides all values
// that may be secret, and is read-only.
type Config struct {
	// Name is the program's name on the page. Empty means the name of its executable file.
	Name string
	// Show selects which kinds of possibly secret values are shown. The zero Show hides all values that may be secret.
	Show Show
	// Allow decides whether a request may apply an operation. If Allow returns an error, the operation is not applied, and
	// the response has the status 403 and the text of the error. For an action on many sagas, Allow is called for each
	// saga. The request's body has been read before Allow is called. A nil Allow means that the console is read-only: the
	// page has no buttons.
	//
	// The console rejects requests from other origins before it calls Allow. Allow must still authenticate the sender,
	// unless a handler around the Console does so.
	Allow func(*http.Request, Operation) error
	// Audit is called after each operation, with its error or nil. If Allow forbids an operation, Audit receives the error
	// of Allow. Audit is not called for a request that is rejected before Allow is called, such as a request from another
	// origin. For an action on many sagas, Audit is called for each saga. The Context that Audit receives has the values
	// of the request's context, but is never canceled. Nil means no audit.
	Audit func(context.Context, Operation, error)
}

// Show selects which kinds of possibly secret values a [Console] shows. The zero Show hides all values that may be
// secret.
type Show struct {
	Errors bool // texts of errors, which may contain keys, and the notes in a saga's log
	Keys   bool // keys of a Group
	State  bool // states of sagas
}

// A Console is an http.Handler that shows the policies of a registry. Create a Console with [New]; it is safe for
// concurrent use.
type Console struct {
	reg     *registry.Registry
	cfg     Config
	process process
	sampler sampler
	origin  *http.CrossOriginProtection
}

// started is approximately the time at which the program started.
var started = time.Now()

// A process is the process whose policies a Console shows.
type process struct {
	Name  string    `json:"name"`
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Start time.Time `json:"start"`
}

// New returns a Console for the policies of reg, including policies that are added later. The Console samples the
// metrics of the policies until Close. New panics if reg is nil.
func New(reg *registry.Registry, cfg Config) *Console {
	if reg == nil {
		panic("console: *registry.Registry is nil: must be set")
	}
	host, _ := os.Hostname()
	c := &Console{reg: reg, cfg: cfg, origin: http.NewCrossOriginProtection(), process: process{
		Name: cmp.Or(cfg.Name, filepath.Base(os.Args[0])), Host: cmp.Or(host, "unknown host"),
		PID: os.Getpid(), Start: started.Round(time.Second),
	}}
	c.sampler.begin(reg)
	return c
}

// Close stops sampling, and waits until the current sample is complete. If an action on many sagas is in progress,
// Close makes the action end after the current saga. A closed Console responds to requests with status 503.
func (c *Console) Close() {
	c.sampler.stop()
	c.sampler.ended.Wait()
}

var errClosed = errors.New("console is closed")

//go:embed assets
var assets embed.FS

// ServeHTTP serves the pages and the actions. ServeHTTP expects r.URL.Path relative to the console's root, so mount the
// Console with http.StripPrefix.
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
		c.fail(w, r, http.StatusMethodNotAllowed, errors.New("this page supports only GET and HEAD"))
		return
	}
	switch r.URL.Path {
	case "":
		// Redirect to the path with a slash, because the page's links are relative to a directory.
		at, _, _ := strings.Cut(r.RequestURI, "?")
		w.Header().Set("Location", path.Base(at)+"/")
		w.WriteHeader(http.StatusMovedPermanently)
	case "/":
		c.overview(w, r)
	case "/policy":
		c.policy(w, r)
	case "/sagas":
		c.sagas(w, r, http.StatusOK, r.URL.Query(), result{}, nil)
	case "/saga":
		c.saga(w, r, http.StatusOK, r.URL.Query(), nil)
	case "/console.css", "/console.js", "/icon.svg":
		w.Header().Set("Cache-Control", "no-cache")
		http.ServeFileFS(w, r, assets, "assets"+r.URL.Path)
	default:
		c.fail(w, r, http.StatusNotFound, errors.New("there is no such page"))
	}
}

// secure sets headers that let the page use only scripts, styles and requests of the console, and that prevent other
// sites from embedding the page.
func secure(h http.Header) {
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "+
		"connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
	h.Set("X-Frame-Options", "DENY")
	h.Set("X-Content-Type-Options", "nosniff")
	// The value same-origin hides the page's address from other sites. With the value no-referrer, browsers would send the
	// console's own forms with the origin null over plain HTTP, and the console would reject them.
	h.Set("Referrer-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}
