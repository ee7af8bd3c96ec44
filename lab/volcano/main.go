// Volcano's Job type, as a JSON schema or to decode a manifest into.
//
//	go run . schema            print {"source": ..., "schema": ...}, made from the types and their markers
//	go run . check < JOB.json  decode strictly; print what became of the claims
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	kjson "sigs.k8s.io/json"
	batch "volcano.sh/apis/pkg/apis/batch/v1alpha1"
)

const module = "volcano.sh/apis"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) == 1 && arguments[0] == "schema" {
		return printSchema()
	}
	if len(arguments) == 1 && arguments[0] == "check" {
		return check()
	}
	return fmt.Errorf("usage: volcano schema | check < JOB.json")
}

func check() error {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	var job batch.Job
	faults, err := kjson.UnmarshalStrict(text, &job)
	if err != nil {
		return err
	}
	if len(faults) > 0 {
		return fmt.Errorf("%v", faults)
	}
	for _, task := range job.Spec.Tasks {
		spec := task.Template.Spec
		claims := []any{}
		for _, container := range spec.Containers {
			claims = append(claims, container.Resources.Claims)
		}
		line, err := json.Marshal(map[string]any{
			"task": task.Name, "resourceClaims": spec.ResourceClaims, "claims": claims,
		})
		if err != nil {
			return err
		}
		fmt.Println(string(line))
	}
	return nil
}

func printSchema() error {
	version, err := command("go", "list", "-m", "-f", "{{.Version}}", module)
	if err != nil {
		return err
	}
	made := maker{definitions: map[string]any{}, packages: map[string]docs{}}
	root, err := made.of(reflect.TypeOf(batch.Job{}))
	if err != nil {
		return err
	}
	root["$defs"] = made.definitions
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(map[string]any{"source": module + " " + version, "schema": root}); err != nil {
		return err
	}
	_, err = os.Stdout.Write(out.Bytes())
	return err
}

func command(name string, arguments ...string) (string, error) {
	text, err := exec.Command(name, arguments...).Output()
	return strings.TrimSpace(string(text)), err
}

// docs are a package's comments on fields, by type and field.
type docs map[string]map[string]string

type maker struct {
	definitions map[string]any
	packages    map[string]docs
}

var fixed = map[string]map[string]any{
	"k8s.io/apimachinery/pkg/api/resource.Quantity":   {"type": []string{"string", "number"}},
	"k8s.io/apimachinery/pkg/util/intstr.IntOrString": {"type": []string{"string", "integer"}},
	"k8s.io/apimachinery/pkg/apis/meta/v1.Time":       {"type": "string"},
	"k8s.io/apimachinery/pkg/apis/meta/v1.MicroTime":  {"type": "string"},
	"k8s.io/apimachinery/pkg/apis/meta/v1.Duration":   {"type": "string"},
	"k8s.io/apimachinery/pkg/apis/meta/v1.FieldsV1":   {"type": "object"},
}

func (m *maker) of(kind reflect.Type) (map[string]any, error) {
	name := kind.PkgPath() + "." + kind.Name()
	if known, ok := fixed[name]; ok {
		return clone(known), nil
	}
	switch kind.Kind() {
	case reflect.Pointer:
		return m.of(kind.Elem())
	case reflect.String:
		return map[string]any{"type": "string"}, nil
	case reflect.Bool:
		return map[string]any{"type": "boolean"}, nil
	case reflect.Int, reflect.Int32, reflect.Int64:
		return map[string]any{"type": "integer"}, nil
	case reflect.Slice:
		if kind.Elem().Kind() == reflect.Uint8 {
			return map[string]any{"type": "string"}, nil
		}
		items, err := m.of(kind.Elem())
		return map[string]any{"type": "array", "items": items}, err
	case reflect.Map:
		values, err := m.of(kind.Elem())
		return map[string]any{"type": "object", "additionalProperties": values}, err
	case reflect.Struct:
		// Packages have types of the same name.
		short := filepath.Base(filepath.Dir(kind.PkgPath())) + "." + kind.Name()
		if _, ok := m.definitions[short]; !ok {
			m.definitions[short] = nil
			made, err := m.structure(kind)
			if err != nil {
				return nil, err
			}
			m.definitions[short] = made
		}
		return map[string]any{"$ref": "#/$defs/" + short}, nil
	default:
		return nil, fmt.Errorf("%s: kind %s is not handled", name, kind.Kind())
	}
}

func (m *maker) structure(kind reflect.Type) (map[string]any, error) {
	properties, required := map[string]any{}, []string{}
	if err := m.fields(kind, properties, &required); err != nil {
		return nil, err
	}
	made := map[string]any{"type": "object", "properties": properties, "additionalProperties": false}
	if len(required) > 0 {
		made["required"] = required
	}
	return made, nil
}

func (m *maker) fields(kind reflect.Type, properties map[string]any, required *[]string) error {
	for index := range kind.NumField() {
		field := kind.Field(index)
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "-" || !field.IsExported() {
			continue
		}
		if name == "" && field.Anonymous {
			if err := m.fields(field.Type, properties, required); err != nil {
				return err
			}
			continue
		}
		made, err := m.of(field.Type)
		if err != nil {
			return err
		}
		comment, err := m.comment(kind, field.Name)
		if err != nil {
			return err
		}
		if err := mark(made, comment); err != nil {
			return fmt.Errorf("%s.%s: %w", kind, field.Name, err)
		}
		properties[name] = made
		if !strings.Contains(options, "omitempty") && !strings.Contains(comment, "+optional") {
			*required = append(*required, name)
		}
	}
	return nil
}

var marker = regexp.MustCompile(`(?m)^\+kubebuilder:validation:(\w+):?=(.*)$`)

// mark adds what a field's markers ask for.
func mark(schema map[string]any, comment string) error {
	for _, found := range marker.FindAllStringSubmatch(comment, -1) {
		key, value := strings.ToLower(found[1][:1])+found[1][1:], strings.TrimSpace(found[2])
		switch key {
		case "enum":
			schema[key] = strings.Split(value, ";")
		case "pattern":
			schema[key] = strings.Trim(value, "`")
		case "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems":
			number, err := strconv.Atoi(value)
			if err != nil {
				return err
			}
			schema[key] = number
		}
	}
	return nil
}

// comment reads what stands above a field in its package's source.
func (m *maker) comment(kind reflect.Type, field string) (string, error) {
	path := kind.PkgPath()
	if _, ok := m.packages[path]; !ok {
		directory, err := command("go", "list", "-f", "{{.Dir}}", path)
		if err != nil {
			return "", err
		}
		read, err := readDocs(directory)
		if err != nil {
			return "", err
		}
		m.packages[path] = read
	}
	return m.packages[path][kind.Name()][field], nil
}

func readDocs(directory string) (docs, error) {
	found := docs{}
	files, err := filepath.Glob(filepath.Join(directory, "*.go"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") || strings.HasSuffix(file, ".pb.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		ast.Inspect(parsed, func(node ast.Node) bool {
			declared, ok := node.(*ast.TypeSpec)
			if !ok {
				return true
			}
			structure, ok := declared.Type.(*ast.StructType)
			if !ok {
				return true
			}
			fields := map[string]string{}
			for _, field := range structure.Fields.List {
				for _, name := range field.Names {
					fields[name.Name] = field.Doc.Text()
				}
			}
			found[declared.Name.Name] = fields
			return true
		})
	}
	return found, nil
}

func clone(schema map[string]any) map[string]any {
	made := map[string]any{}
	for key, value := range schema {
		made[key] = value
	}
	return made
}
