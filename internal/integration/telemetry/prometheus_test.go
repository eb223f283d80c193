// Package telemetry tests what resilienceotel exports against the programs that read it.
package telemetry_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
)

const (
	alerts    = "../../../resilienceotel/alerts"
	dashboard = "../../../resilienceotel/dashboards/resilience.json"
	runbook   = "../../../docs/runbook.md"
)

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(text)
}

// TestAlertRules tests how long each alert waits, which the test below cannot.
func TestAlertRules(t *testing.T) {
	require.Contains(t, services.Promtool(t, alerts, "check", "rules", "resilience.rules.yml"), "12 rules found")
	services.Promtool(t, alerts, "test", "rules", "resilience.rules_test.yml")
}

// Each alert links to a section of the runbook. The section names the alert and the row of the dashboard. It describes
// what an operator sees, what that means, what to check and what to do.
func TestRunbookHasASectionForEachAlert(t *testing.T) {
	sections := map[string]string{} // by anchor
	for _, text := range strings.Split(read(t, runbook), "\n## ")[1:] {
		heading, _, _ := strings.Cut(text, "\n")
		sections[strings.ReplaceAll(strings.ToLower(heading), " ", "-")] = text
	}
	var rows []string
	for _, p := range readBoard(t).Panels {
		if p.Type == "row" {
			rows = append(rows, p.Title)
		}
	}
	link := regexp.MustCompile(`(?s)- alert: (\w+).*?runbook_url: \S+/docs/runbook\.md#(\S+)`)
	links := link.FindAllStringSubmatch(read(t, alerts+"/resilience.rules.yml"), -1)
	require.Len(t, links, 12)
	for _, link := range links {
		row := regexp.MustCompile("Alert `" + link[1] +
			"`; the row \\*(\\w+)\\* of the dashboard").FindStringSubmatch(sections[link[2]])
		require.Len(t, row, 2, "%s in %s", link[1], link[2])
		require.Contains(t, rows, row[1])
		require.Regexp(t, `(?s)\*\*You see\.\*\*.*\*\*Meaning\.\*\*.*\*\*Check\*\*.*\*\*Act`, sections[link[2]])
	}
}

// TestPrometheus scrapes a plant, sees the alerts of its faults fire and no other,
// and evaluates every query of the dashboard. Minutes are seconds here.
func TestPrometheus(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: services.Redis(t), ContextTimeoutEnabled: true, MaxRetries: -1})
	t.Cleanup(func() { _ = rdb.Close() })
	plant, collected := newPlant(t, 100*time.Millisecond, resilienceredis.Eval(rdb))
	server := httptest.NewServer(promhttp.HandlerFor(collected,
		promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}))
	t.Cleanup(server.Close)
	rules := read(t, alerts+"/resilience.rules.yml")
	for _, change := range [][2]string{{`\[\d+m\]`, "[10s]"}, {`\[10m:1m\]`, "[10s:1s]"}, {`for: \d+m`, "for: 1s"},
		{`offset \d+m`, "offset 5s"}, {`> 300\b`, "> 2"}} {
		changed := regexp.MustCompile(change[0]).ReplaceAllString(rules, change[1])
		require.NotEqual(t, rules, changed, "the rules have no %s any more", change[0])
		rules = changed
	}
	p := querier{t, services.Prometheus(t, map[string]string{
		"rules.yml": rules,
		"prometheus.yml": fmt.Sprintf(`
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [rules.yml]
scrape_configs:
  - job_name: plant
    metrics_path: /
    static_configs: [{targets: [%q]}]
`, server.Listener.Addr()),
	})}
	require.Eventually(t, func() bool { // what would fire by itself has had the time to
		return p.query(`count_over_time(resilience_bulkhead_limit{resilience_name="users"}[1m]) > 4`) > 0
	}, 2*time.Minute, 100*time.Millisecond)
	require.Empty(t, p.firing(), "all is well")
	together := slices.DeleteFunc(incidents(), func(in incident) bool { // what others of them hide
		return in.what == "a slow dependency" || in.what == "no runner runs" || in.what == "an unreadable store of sagas"
	})
	var all []string
	for _, in := range together {
		all = slices.AppendSeq(all, maps.Keys(in.fires))
		in.begin(plant)
	}
	slices.Sort(all)
	deadline := time.Now().Add(2 * time.Minute)
	for firing := p.firing(); !slices.Equal(firing, all); firing = p.firing() {
		require.Subset(t, all, firing)
		require.True(t, time.Now().Before(deadline), "%v fire, not %v", firing, all)
		time.Sleep(100 * time.Millisecond)
	}
	for _, in := range together {
		in.end(plant)
	}

	for title, queries := range dashboardQueries(t) {
		for _, q := range queries {
			require.NotZero(t, p.query(q), "%s: no data: %s", title, q)
		}
	}
	for _, v := range variables(t) {
		require.NotEmpty(t, p.labelValues(v[2], v[1]), v)
	}
}

// A board is what the test needs of the dashboard.
type board struct {
	Panels []struct {
		Type, Title string
		Targets     []struct{ Expr string }
	}
	Templating struct {
		List []struct{ Type, Query string }
	}
}

func readBoard(t *testing.T) (b board) {
	require.NoError(t, json.Unmarshal([]byte(read(t, dashboard)), &b))
	return b
}

var grafana = strings.NewReplacer("$__rate_interval", "1m", "$job", ".*", "$name", ".*")

// dashboardQueries returns the queries of each panel, with Grafana's variables filled in.
func dashboardQueries(t *testing.T) map[string][]string {
	all := map[string][]string{}
	for i, p := range readBoard(t).Panels {
		if p.Type == "row" {
			continue
		}
		require.NotEmpty(t, p.Targets, p.Title)
		for _, target := range p.Targets {
			title := fmt.Sprint(i, " ", p.Title)
			all[title] = append(all[title], grafana.Replace(target.Expr))
		}
	}
	require.NotEmpty(t, all)
	return all
}

// variables returns the selector and the label of each variable of the dashboard.
func variables(t *testing.T) (all [][]string) {
	for _, v := range readBoard(t).Templating.List {
		if v.Type == "query" {
			m := regexp.MustCompile(`^label_values\((.+), (\w+)\)$`).FindStringSubmatch(grafana.Replace(v.Query))
			require.Len(t, m, 3, v.Query)
			all = append(all, m)
		}
	}
	require.Len(t, all, 2)
	return all
}

// A querier asks a Prometheus.
type querier struct {
	t   *testing.T
	url string
}

func (p querier) get(path string, query url.Values, data any) {
	p.t.Helper()
	resp, err := http.Get(p.url + "/api/v1/" + path + "?" + query.Encode())
	require.NoError(p.t, err)
	defer func() { _ = resp.Body.Close() }()
	answer := struct {
		Status, Error string
		Data          any
	}{Data: data}
	require.NoError(p.t, json.NewDecoder(resp.Body).Decode(&answer))
	require.Equal(p.t, "success", answer.Status, "%s: %v", query, answer.Error)
}

// query returns how many series have a number.
func (p querier) query(expr string) (n int) {
	p.t.Helper()
	var data struct {
		Result []struct{ Value [2]any }
	}
	p.get("query", url.Values{"query": {expr}}, &data)
	for _, series := range data.Result {
		if v, err := strconv.ParseFloat(series.Value[1].(string), 64); err == nil && !math.IsNaN(v) {
			n++
		}
	}
	return n
}

func (p querier) labelValues(label, match string) (values []string) {
	p.t.Helper()
	p.get("label/"+label+"/values", url.Values{"match[]": {match}}, &values)
	return values
}

// firing returns the alerts that fire, with the names of their policies and sagas.
func (p querier) firing() (all []string) {
	p.t.Helper()
	var data struct {
		Alerts []struct {
			State  string
			Labels map[string]string
		}
	}
	p.get("alerts", nil, &data)
	for _, a := range data.Alerts {
		if a.State == "firing" {
			all = append(all, strings.TrimSpace(strings.Join([]string{a.Labels["alertname"], a.Labels["resilience_name"],
				a.Labels["resilience_saga"]}, " ")))
		}
	}
	slices.Sort(all)
	return all
}
