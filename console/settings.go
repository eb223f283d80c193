package console

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// A settingField is one setting in the form. Its Value is JSON, a text without its quotes.
type settingField struct {
	Path  string // "Failures", "Adaptive.Min"
	Value string
	Text  bool
}

// fields returns the settings of a JSON object, those of nested objects by their path.
func fields(path string, settings []byte) (all []settingField) {
	d := json.NewDecoder(bytes.NewReader(settings))
	if _, err := d.Token(); err != nil {
		return nil
	}
	for d.More() {
		name, err := d.Token()
		var value json.RawMessage
		if err = errors.Join(err, d.Decode(&value)); err != nil {
			return all
		}
		f := settingField{Path: path + name.(string), Value: string(value)}
		switch value[0] {
		case '{':
			all = append(all, fields(f.Path+".", value)...)
			continue
		case '"':
			f.Text = true
			_ = json.Unmarshal(value, &f.Value)
		}
		all = append(all, f)
	}
	return all
}

// changes returns the settings that a form changes, as Registry.Apply takes them: those
// whose value is not what the page showed.
func changes(fields []settingField, was, is func(path string) (string, bool)) (json.RawMessage, error) {
	root := map[string]any{}
	var errs []error
	for _, f := range fields {
		old, shown := was(f.Path)
		now, sent := is(f.Path)
		if !shown || !sent || old == now {
			continue
		}
		value := json.RawMessage(now)
		if f.Text {
			value = encode(now)
		} else if !json.Valid(value) {
			errs = append(errs, fmt.Errorf("%s: is %q: must be like %s", f.Path, now, f.Value))
			continue
		}
		at := root
		names := strings.Split(f.Path, ".")
		for _, name := range names[:len(names)-1] {
			if at[name] == nil {
				at[name] = map[string]any{}
			}
			at = at[name].(map[string]any)
		}
		at[names[len(names)-1]] = value
	}
	if errs != nil {
		return nil, errors.Join(errs...)
	}
	return encode(root), nil
}
