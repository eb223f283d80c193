package console

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

var pages = template.Must(template.New("").Funcs(template.FuncMap{
	"ago":     ago,
	"words":   inWords,
	"capital": func(text any) string { return capital(fmt.Sprint(text)) },
	"list":    func(values ...any) []any { return values },
	"stamp":   stamp,
	"since":   since,
	"json":    func(v any) string { return string(encode(v)) },
	"query": func(pairs ...string) template.URL { // returns an encoded query, which the template must not escape again
		q := url.Values{}
		for i := 0; i+1 < len(pairs); i += 2 {
			if pairs[i+1] != "" {
				q.Set(pairs[i], pairs[i+1])
			}
		}
		return template.URL(q.Encode())
	},
}).ParseFS(assets, "assets/*.html"))

// A page has the fields that all pages have in common.
type page struct {
	Process process   `json:"process"`
	At      time.Time `json:"at"`

	Title   string `json:"-"`
	Here    string `json:"-"` // "overview", "policy", "sagas" or "saga"
	Runs    bool   `json:"-"` // a Runner is registered
	Acts    bool   `json:"-"` // actions are allowed
	Done    string `json:"-"` // message after an action
	Refresh int    `json:"-"` // seconds between updates by the script; 0 means no updates
}

func (c *Console) page(here, title string, refresh int) page {
	p := page{Process: c.process, At: time.Now(), Title: title, Here: here, Acts: c.cfg.Allow != nil, Refresh: refresh}
	for e := range c.reg.All() {
		p.Runs = p.Runs || e.Kind == sagaKind
	}
	return p
}

// wantsJSON reports whether a request accepts JSON. A browser that requests a page does not accept it.
func wantsJSON(r *http.Request) bool {
	return strings.Contains(r.Header.Get("Accept"), "application/json")
}

// show writes data as an HTML page or as JSON. It compresses the response if the client accepts gzip, because a browser
// requests an open page every second.
func (c *Console) show(w http.ResponseWriter, r *http.Request, status int, name string, data any) {
	var body bytes.Buffer
	w.Header().Set("Vary", "Accept, Accept-Encoding")
	if wantsJSON(r) {
		w.Header().Set("Content-Type", "application/json")
		body.Write(encode(data))
		body.WriteByte('\n')
	} else {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		if err := pages.ExecuteTemplate(&body, name, data); err != nil {
			panic(err) // a bug: the template does not match its data
		}
	}
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		var small bytes.Buffer
		z, _ := gzip.NewWriterLevel(&small, gzip.BestSpeed)
		_, _ = z.Write(body.Bytes())
		_ = z.Close()
		w.Header().Set("Content-Encoding", "gzip")
		body = small
	}
	w.Header().Set("Content-Length", strconv.Itoa(body.Len()))
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(body.Bytes())
	}
}

// A failure is the page that shows an error.
type failure struct {
	page
	Error string `json:"error"`
}

func (c *Console) fail(w http.ResponseWriter, r *http.Request, status int, err error) {
	c.show(w, r, status, "failure.html", failure{c.page("", http.StatusText(status), 0), err.Error()})
}

func encode(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // a bug: all values are texts or finite numbers
	}
	return data
}

// secret returns the text of an error, or "hidden" if Show.Errors is not set. It does not panic even if the method
// Error panics, as the method of a nil pointer may.
func (c *Console) secret(err error) string {
	if err == nil {
		return ""
	}
	return c.text(fmt.Sprint(err))
}

// text returns err, the text of an error, or "hidden" if Show.Errors is not set.
func (c *Console) text(err string) string {
	if err != "" && !c.cfg.Show.Errors {
		return "hidden"
	}
	return err
}
