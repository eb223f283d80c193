package console

import (
	"bytes"
	"fmt"
	"html/template"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

var pages = template.Must(template.New("").Funcs(template.FuncMap{
	"ago": ago,
	"add": func(a, b int) int { return a + b },
	"dict": func(pairs ...any) map[string]any {
		m := map[string]any{}
		for i := 0; i+1 < len(pairs); i += 2 {
			m[pairs[i].(string)] = pairs[i+1]
		}
		return m
	},
	"clock": func(t *time.Time) string { return t.Format("15:04:05") },
	"stamp": stamp,
	"query": func(pairs ...string) template.URL { // escaped already
		q := url.Values{}
		for i := 0; i+1 < len(pairs); i += 2 {
			if pairs[i+1] != "" {
				q.Set(pairs[i], pairs[i+1])
			}
		}
		return template.URL(q.Encode())
	},
}).ParseFS(assets, "assets/*.html"))

// A page is what every page has.
type page struct {
	Process process   `json:"process"`
	At      time.Time `json:"at"`

	Title   string `json:"-"`
	Here    string `json:"-"` // "overview", "policy", "sagas" or "saga"
	Sagas   bool   `json:"-"` // there is a Runner
	Acts    bool   `json:"-"` // there are buttons
	Done    string `json:"-"` // what was just done
	Refresh string `json:"-"` // how the script keeps the page up to date: "events?..." or a number of seconds
}

func (c *Console) page(here, title string) page {
	p := page{Process: c.process, At: time.Now(), Title: title, Here: here, Acts: c.cfg.Allow != nil}
	for e := range c.reg.All() {
		p.Sagas = p.Sagas || e.Kind == sagaKind
	}
	return p
}

// wantsJSON reports whether a request asks for the JSON twin of a page.
func wantsJSON(r *http.Request) bool {
	for _, accept := range r.Header.Values("Accept") {
		for part := range strings.SplitSeq(accept, ",") {
			kind, _, _ := strings.Cut(part, ";")
			switch strings.TrimSpace(kind) {
			case "application/json":
				return true
			case "text/html":
				return false
			}
		}
	}
	return false
}

// show answers with a page, or with its JSON twin.
func (c *Console) show(w http.ResponseWriter, r *http.Request, status int, name string, data any) {
	var body bytes.Buffer
	w.Header().Set("Vary", "Accept")
	if wantsJSON(r) {
		w.Header().Set("Content-Type", "application/json")
		body.Write(encode(data))
		body.WriteByte('\n')
	} else {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		if err := pages.ExecuteTemplate(&body, name, data); err != nil {
			panic(err) // a template that does not fit its data
		}
	}
	w.Header().Set("Content-Length", strconv.Itoa(body.Len()))
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(body.Bytes())
	}
}

// A failure is the page of an error.
type failure struct {
	page
	Status int    `json:"-"`
	Error  string `json:"error"`
}

func (c *Console) fail(w http.ResponseWriter, r *http.Request, status int, err error) {
	p := c.page("", http.StatusText(status))
	c.show(w, r, status, "failure.html", failure{page: p, Status: status, Error: err.Error()})
}

// ago returns a duration as a person says it.
func ago(d time.Duration) string {
	switch {
	case d < 0:
		return "0 s"
	case d < 10*time.Second:
		return strconv.FormatFloat(math.Floor(d.Seconds()*10)/10, 'f', -1, 64) + " s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", d/time.Hour)
	}
	return fmt.Sprintf("%d days", d/(24*time.Hour))
}

// stamp returns a time.Time, or what a pointer to one points to.
func stamp(t any) string {
	const layout = "2006-01-02 15:04:05 MST"
	switch t := t.(type) {
	case time.Time:
		return t.Format(layout)
	case *time.Time:
		return t.Format(layout)
	}
	return ""
}

// number returns v with at most three digits that count, and a thin space between thousands.
func number(v float64) string {
	a := math.Abs(v)
	switch {
	case a == 0:
		return "0"
	case a < 0.01:
		return "< 0.01"
	case a < 10:
		return strconv.FormatFloat(math.Round(v*100)/100, 'f', -1, 64)
	case a < 100:
		return strconv.FormatFloat(math.Round(v*10)/10, 'f', -1, 64)
	case a < 10_000:
		return strconv.FormatFloat(math.Round(v), 'f', -1, 64)
	case a < 1e6:
		return strconv.FormatFloat(math.Round(v/100)/10, 'f', -1, 64) + " k"
	}
	return strconv.FormatFloat(math.Round(v/1e5)/10, 'f', -1, 64) + " M"
}

func percent(share float64) string {
	switch p := share * 100; {
	case p <= 0:
		return "0 %"
	case p < 0.1:
		return "< 0.1 %"
	case p < 10:
		return strconv.FormatFloat(math.Round(p*10)/10, 'f', -1, 64) + " %"
	case p > 99 && p < 100:
		return "> 99 %"
	default:
		return strconv.FormatFloat(math.Round(p), 'f', -1, 64) + " %"
	}
}

// rate returns the calls a second as a text.
func (s status) rate() string { return number(s.calls) }

// bad returns which share of the calls failed or was refused, as a text.
func (s status) bad() string {
	switch {
	case s.calls <= 0:
		return "idle"
	case s.failed > 0 && s.refused > 0:
		return percent(s.share()) + " failed or refused"
	case s.refused > 0, s.never:
		return percent(s.share()) + " refused"
	}
	return percent(s.share()) + " failed"
}

// secret returns the text of an error, if errors are shown.
func (c *Console) secret(err error) string {
	switch {
	case err == nil:
		return ""
	case !c.cfg.Show.Errors:
		return "hidden"
	}
	return err.Error()
}

// result is what a POST answers to a script.
type result struct {
	Done    bool            `json:"done"`
	Error   string          `json:"error,omitempty"`
	Changes []settingChange `json:"changes,omitempty"` // of an apply
	// Of an action on many sagas: to how many it was applied, and how many did not
	// allow it.
	Sagas      *int `json:"sagas,omitempty"`
	NotAllowed *int `json:"not_allowed,omitempty"`
}
